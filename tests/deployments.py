"""Real instances, and the ways a sender reaches them: each is a deployment, and every one must behave the same.

A sender here does not retry, and keeps no connection that it could find closed: what fails, fails.
"""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from haproxy_server import program
from relaygr import Candidates, History
from relaygr.clock import RealClock
from relaygr.cluster.haproxy import HaproxyConfig, haproxy
from relaygr.errors import DeadlineExceeded, Overloaded, RelayError, Unavailable
from relaygr.relay import Health, Membership, Router, RouterConfig, Trigger
from relaygr.serving.client import Client, HttpClient, Response
from relaygr.serving.ranking import RelayRanking
from relaygr.serving.wire import Behaviours, Encoding, PreInferBody, PreInferReply, RankBody, RankReply, encode

__all__ = [
    "TOKEN",
    "WITHIN_S",
    "Balanced",
    "Deployment",
    "Fleet",
    "Plain",
    "Processes",
    "Ranks",
    "Sender",
    "admin",
    "balanced",
    "free_port",
    "instances",
    "plain",
    "until",
]

TOKEN = "a token that is only for tests".replace(" ", "-")
WITHIN_S = 60.0
"""How long anything that must happen may take on a machine that does much else."""


DUE_S = 0.5
"""When a signal's rank is expected: its slot is charged with it until then."""


@dataclass
class Ranks:
    """A rank's answer."""

    scores: Any
    path: str
    slot: str


async def until(holds: Any) -> None:
    """Wait until it holds: another side's state."""
    async with asyncio.timeout(WITHIN_S):
        while not await holds():  # noqa: ASYNC110  (it tells nobody)
            await asyncio.sleep(0.01)


# ---- instances


class Fleet(Protocol):
    """Instances under stable names, and what may be done to them."""

    folder: Path

    @property
    def addresses(self) -> dict[str, str]: ...

    def start(self, *slots: str) -> None:
        """Start these again, and wait until they serve."""
        ...

    def restore(self) -> None:
        """Start those that have ended."""
        ...

    def kill(self, slot: str) -> None: ...

    def freeze(self, slot: str) -> None: ...

    def thaw(self, slot: str) -> None: ...

    async def admin(self, slot: str, call: str, **body: Any) -> Any:
        """An operator's call to one instance."""
        ...


@dataclass
class Processes:
    """Instances as plain processes, at addresses that stay."""

    folder: Path
    model: Path
    addresses: dict[str, str]
    processes: dict[str, "subprocess.Popen[str]"] = field(default_factory=dict)

    def start(self, *slots: str) -> None:
        """Start these, and wait until they serve."""
        for slot in slots:
            port = self.addresses[slot].rpartition(":")[2]
            command = [sys.executable, "-m", "relaygr", "serve", "instance", "--slot", slot, "--port", port]
            command += ["--model", str(self.model), "--config", str(self.folder / "relaygr.toml")]
            self.processes[slot] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for slot in slots:
            out = self.processes[slot].stdout
            assert out is not None
            assert "serves on" in out.readline(), f"{slot} did not start"

    def kill(self, slot: str) -> None:
        process = self.processes[slot]
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def freeze(self, slot: str) -> None:
        self.processes[slot].send_signal(signal.SIGSTOP)

    def thaw(self, slot: str) -> None:
        self.processes[slot].send_signal(signal.SIGCONT)

    def restore(self) -> None:
        """Start those that have ended."""
        self.start(*(slot for slot, process in self.processes.items() if process.poll() is not None))

    async def admin(self, slot: str, call: str, **body: Any) -> Any:
        return await admin(self.addresses[slot], call, **body)


async def admin(address: str, call: str, **body: Any) -> Any:
    """An operator's call to one instance."""
    client = HttpClient.to(address, keep=0)
    headers = {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"}
    reply = await client.request("POST", f"/v1/admin/{call}", msgspec.json.encode(body), headers)
    assert reply.status == 200, reply
    return msgspec.json.decode(reply.body)


@contextlib.contextmanager
def instances(folder: Path, model: Path, slots: tuple[str, ...]) -> Iterator[Processes]:
    """Instances of this model, each on a port of its own."""
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    (folder / "relaygr.toml").write_text(
        f'[engine]\ndevice_cache = "16MiB"\nhost_cache = "16MiB"\n[instance]\nthreads = 1\ndrain_s = 5.0\n'
        f'[admin]\ntoken_file = "{token}"\n'
    )
    fleet = Processes(folder, model, {slot: f"http://127.0.0.1:{free_port()}" for slot in slots})
    try:
        fleet.start(*slots)
        yield fleet
    finally:
        for slot in fleet.processes:
            fleet.kill(slot)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# ---- deployments


class Deployment(Protocol):
    """How a sender reaches instances. Raises RelayErrors; a deadline is kept by the sender, too."""

    async def signal(self, user: str, history: History, within_s: float) -> str:
        """Ask for the prefix; returns the slot that answered."""
        ...

    async def rank(self, user: str, history: History, items: Any, within_s: float) -> Ranks: ...

    async def sees(self, slot: str) -> bool:
        """Whether new requests may go to the slot."""
        ...

    async def idle(self) -> bool:
        """Whether no slot has any load: then keys go where they belong."""
        ...

    async def forget(self) -> None:
        """As if all leases had ended: nobody's messages follow earlier ones."""
        ...


class Plain:
    """The gateway's own router, in front of plain processes."""

    def __init__(self, ranking: RelayRanking) -> None:
        self._ranking = ranking
        self._signalled: dict[str, str] = {}

    async def signal(self, user: str, history: History, within_s: float) -> str:
        async with _deadline(within_s):
            told = await self._ranking.signal(user, history, None, due=RealClock().now() + DUE_S)
        assert told.slot is not None
        self._signalled[user] = told.slot
        return told.slot

    async def rank(self, user: str, history: History, items: Any, within_s: float) -> Ranks:
        deadline, slot = RealClock().now() + within_s, self._signalled.pop(user, None)
        async with _deadline(within_s):
            reply = await self._ranking.rank(user, history, Candidates(items), None, None, slot=slot, deadline=deadline)
        assert reply.slot is not None
        return Ranks(reply.scores, reply.path, reply.slot)

    async def sees(self, slot: str) -> bool:
        return self._ranking.membership.health(slot) is Health.UP

    async def idle(self) -> bool:
        return not any(self._ranking.router.loads().values())

    async def forget(self) -> None:
        self._signalled.clear()


@contextlib.asynccontextmanager
async def plain(fleet: Fleet, folder: Path) -> AsyncIterator[Plain]:
    membership = Membership()
    for slot, address in fleet.addresses.items():
        membership.add(slot, address)
    router = Router(membership, RouterConfig(quiet_tokens=100_000))

    def connect(address: str) -> HttpClient:
        return HttpClient.to(address, keep=0)

    async with RelayRanking(membership, router, Trigger(), RealClock(), connect=connect) as ranking:
        yield Plain(ranking)


class Sender:
    """Someone who sends messages by a client, whole histories with them, and leaves it to the other side to route."""

    def __init__(self, client: Client, patience_s: float = 0.0) -> None:
        """`patience_s`: how long after a deadline the other side may take to say that it has passed."""
        self._client, self._patience_s = client, patience_s

    async def signal(self, user: str, history: History, within_s: float) -> str:
        body = PreInferBody(**_whole(user, history))
        reply = await self._post("/v1/pre-infer", user, body, within_s)
        return msgspec.msgpack.decode(_well(reply, 202), type=PreInferReply).slot

    async def rank(self, user: str, history: History, items: Any, within_s: float) -> Ranks:
        body = RankBody(**_whole(user, history), candidates=np.asarray(items, np.int64).tobytes())
        reply = msgspec.msgpack.decode(_well(await self._post("/v1/rank", user, body, within_s), 200), type=RankReply)
        return Ranks(reply.to_array(), reply.path, reply.slot)

    def headers(self, user: str) -> dict[str, str]:
        """What says where a user's message belongs."""
        return {"x-relaygr-key": user}

    async def _post(self, path: str, user: str, body: PreInferBody, within_s: float) -> Response:
        headers = {
            "content-type": Encoding.MSGPACK.value,
            "x-relaygr-deadline-ms": f"{within_s * 1e3:.3f}",
            **self.headers(user),
        }
        async with _deadline(within_s + self._patience_s):
            return await self._client.request("POST", path, encode(Encoding.MSGPACK, body), headers)


class Balanced(Sender):
    """HAProxy, configured from the membership. It keeps deadlines itself."""

    def __init__(self, port: int, commands: Path) -> None:
        super().__init__(HttpClient("127.0.0.1", port, keep=0), patience_s=WITHIN_S)
        self._commands = commands

    async def sees(self, slot: str) -> bool:
        return (await self._column("status"))[slot] == "UP"

    async def idle(self) -> bool:
        return not any(int(load) for load in (await self._column("scur")).values())

    async def _column(self, name: str) -> dict[str, str]:
        """Of HAProxy's statistics, by slot."""
        header, *rows = (await self._command("show stat instances 4 -1")).splitlines()
        at = header.split(",").index(name)
        return {row.split(",")[1]: row.split(",")[at] for row in rows if row}

    async def forget(self) -> None:
        await self._command("clear table instances")

    async def _command(self, command: str) -> str:
        reader, writer = await asyncio.open_unix_connection(str(self._commands))
        writer.write(command.encode() + b"\n")
        try:
            return (await reader.read()).decode()
        finally:
            writer.close()
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def balanced(fleet: Fleet, folder: Path) -> AsyncIterator[Balanced]:
    membership = Membership()
    for slot, address in fleet.addresses.items():
        membership.add(slot, address)
    port, commands, file = free_port(), folder / "haproxy.sock", folder / "haproxy.cfg"
    file.write_text(haproxy(membership, HaproxyConfig(bind=f"127.0.0.1:{port}", socket=str(commands), check_ms=50)))
    process = await asyncio.create_subprocess_exec(program(), "-f", str(file), stderr=subprocess.DEVNULL)
    try:
        await until(lambda: _listens(commands))
        yield Balanced(port, commands)
    finally:
        process.kill()
        await process.wait()


async def _listens(commands: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(str(commands))
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


def _whole(user: str, history: History) -> dict[str, Any]:
    behaviours = Behaviours(history.items.tobytes(), history.actions.tobytes(), history.timestamps.tobytes())
    return {"user": user, "length": len(history), "digest": history.digest(), "behaviours": behaviours}


@contextlib.asynccontextmanager
async def _deadline(within_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(within_s):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded("the sender waits no longer") from error


def _well(reply: Response, status: int) -> bytes:
    if reply.status == status:
        return reply.body
    kinds: dict[int, type[RelayError]] = {429: Overloaded, 502: Unavailable, 503: Unavailable, 504: DeadlineExceeded}
    if reply.status not in kinds:
        raise AssertionError(f"{reply.status}: {reply.body!r}")
    raise kinds[reply.status](repr(reply.body))
