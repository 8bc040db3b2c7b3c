"""A Ray cluster for tests, small and silent, and instances of the relay on it that tests may kill, freeze and hold.

Import it only where Ray is there: `require("ray", …)` first.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError

from deployments import TOKEN, WITHIN_S, admin, free_port
from relaygr.cluster.ray.application import APP, INSTANCE
from relaygr.cluster.ray.directory import NAMESPACE, directory
from relaygr.cluster.ray.instance import Instance
from relaygr.cluster.ray.run import deploy
from relaygr.cluster.ray.slots import Held
from relaygr.serving.settings import Settings, read

__all__ = ["SUITE", "HeldInstance", "RayFleet", "running_ray", "settings_for", "table"]

TESTS = Path(__file__).parent
SUITE = "suite"
"""The application of a fleet. Handles keep the router that they first had, so each has a name of its own."""


@contextlib.contextmanager
def running_ray() -> Iterator[str]:
    """Ray on this machine, with few processes and little memory, that tells nobody; nothing is left of it.

    Gives the address of Serve's proxy.
    """
    paths = [str(TESTS.parent / "src"), str(TESTS), os.environ.get("PYTHONPATH", "")]
    silent = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_TPU_METRICS_ENABLED": "0",
        "GRPC_ENABLE_FORK_SUPPORT": "0",
        "PYTHONPATH": ":".join(filter(None, paths)),
    }
    before = {name: os.environ.get(name) for name in silent}
    os.environ.update(silent)
    ray.init(
        "local",
        num_cpus=16,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        logging_level="error",
        log_to_driver=False,
    )
    try:
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        for app in (APP, SUITE):
            directory(app).end()
        ray.shutdown()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class HeldInstance(Instance):
    """An instance that begins only when there is no file `hold` beside its token: Ray starts them sooner than a test
    has looked at what holds without them."""

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]  # Serve awaits it
        assert settings.admin.token_file is not None
        hold = Path(settings.admin.token_file).with_name("hold")
        while hold.exists():  # noqa: ASYNC110  (another process makes and removes it)
            await asyncio.sleep(0.02)
        await super().__init__(settings)


def settings_for(folder: Path, text: str) -> Settings:
    """Of a file with this text, an operator's token, and little asked of Ray."""
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    file = folder / "relay.toml"
    file.write_text(f'{text}\n[admin]\ntoken_file = "{token}"\n')
    settings = read(file)
    # Serve's proxy has a port already, and processors are not what is tested.
    return replace(settings, ray=replace(settings.ray, instance_cpus=0.1, gateway_cpus=0.1))


def table(app: str = APP) -> dict[str, Held]:
    """Who holds which slot; nobody while that cannot be told."""
    try:
        actor = ray.get_actor(f"relaygr-slots-{app}", namespace=NAMESPACE)
        return {held.slot: held for held in ray.get(actor.table.remote()) or ()}
    except (ValueError, RayActorError):
        return {}


@dataclass
class RayFleet:
    """Instances that Ray runs, under stable names: what the processes of `deployments.Fleet` are without it."""

    folder: Path
    settings: Settings
    handle: Any = None
    through: dict[str, str] | None = None
    """Addresses to send to instead of the instances' own."""

    @contextlib.contextmanager
    def running(self) -> Iterator["RayFleet"]:
        deploy(self.settings, name=SUITE, instance=HeldInstance)
        self.handle = serve.get_deployment_handle(INSTANCE, SUITE)
        try:
            yield self
        finally:
            self._hold.unlink(missing_ok=True)
            serve.delete(SUITE)

    @property
    def addresses(self) -> dict[str, str]:
        return self.through or {slot: held.address for slot, held in table(SUITE).items()}

    @property
    def _hold(self) -> Path:
        return self.folder / "hold"

    def kill(self, slot: str) -> None:
        """The process ends at once; what Ray starts instead waits for `start`."""
        self._hold.touch()
        os.kill(table(SUITE)[slot].pid, signal.SIGKILL)

    def start(self, *slots: str) -> None:
        """Let Ray's own restart go on, and wait until the slots are held again."""
        self._hold.unlink(missing_ok=True)
        began = time.monotonic()
        while not all(slot in table(SUITE) and _runs(table(SUITE)[slot].pid) for slot in slots):
            assert time.monotonic() - began < WITHIN_S, f"{slots} are not back"
            time.sleep(0.05)

    def restore(self) -> None:
        self.start(*(f"slot-{number}" for number in range(self.settings.ray.instances)))

    def freeze(self, slot: str) -> None:
        os.kill(table(SUITE)[slot].pid, signal.SIGSTOP)

    def thaw(self, slot: str) -> None:
        os.kill(table(SUITE)[slot].pid, signal.SIGCONT)

    async def admin(self, slot: str, call: str, **body: Any) -> Any:
        return await admin(table(SUITE)[slot].address, call, **body)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False
