"""What operators do to a running server: drain it, swap its model, evict a user. Every call carries the token.

These calls stand beside a server's own, under /v1/admin/, and are refused before their bodies are read.
"""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from relaygr.errors import InvalidInput, RelayError, Unavailable
from relaygr.history import HistoryStore
from relaygr.history.store import user_key
from relaygr.relay import Membership
from relaygr.serving import admin_operations, link
from relaygr.serving.admin_operations import PREFIX, DrainBody, EvictBody, EvictReply, SwapBody, SwapReply
from relaygr.serving.client import Client, HttpClient
from relaygr.serving.http import App, Receive, Reply, Request, Scope, Send
from relaygr.serving.wire import Encoding, ErrorReply, decode, encode
from relaygr.shown import shown

__all__ = ["AdminApp", "AdminSettings", "Beside", "evict_at_instance", "evict_everywhere", "swap_at_instance"]

MAX_BODY: Final = 64 * 2**10
SHORTEST: Final = 16
"""Bytes of a token."""
ASK_S: Final = 5.0
"""How long an instance may take to evict a user."""


@dataclass(frozen=True)
class AdminSettings:
    """Who may drain a server, swap its model and evict users."""

    token_file: str | None = None
    """The file with the token that these calls carry, for its owner alone to read. Not set: they are refused. The same
    for a gateway and its instances."""

    def token(self) -> bytes | None:
        """What the file has. InvalidInput for one that is missing, short, or others can read."""
        if self.token_file is None:
            return None
        path = Path(self.token_file)
        try:
            mode, token = path.stat().st_mode, path.read_bytes().strip()
        except OSError as error:
            raise InvalidInput("admin.token_file", f"{path} cannot be read: {error.strerror or error}") from error
        if mode & 0o077:
            raise InvalidInput("admin.token_file", f"{path} can be read by others: chmod 600 {path}")
        if len(token) < SHORTEST or not token.isascii() or any(byte <= 32 for byte in token):
            raise InvalidInput("admin.token_file", f"{path} must have {SHORTEST} visible characters of ASCII at least")
        return token


Evict = Callable[[str], Awaitable[EvictReply]]
Swap = Callable[[str], Awaitable[SwapReply]]


class AdminApp(App):
    """The calls of an operator. Without a token there are none: 403. With another one: 401."""

    calls = {}  # noqa: RUF012  (each has its own)

    def __init__(self, app: App, token: bytes | None, evict: Evict, swap: Swap | None = None) -> None:
        super().__init__(MAX_BODY)
        known = admin_operations.GATEWAY if swap is None else admin_operations.INSTANCE
        self.calls = {operation.path: operation.method for operation in known}  # type: ignore[misc]  # one's own
        self._app, self._token, self._evict, self._swap = app, token, evict, swap

    def refused(self, headers: Mapping[bytes, bytes]) -> Reply | None:
        """From the headers alone, in the same time for any wrong token."""
        if self._token is None:
            return _refusal(403, "no token is set here: name its file under [admin] token_file")
        if hmac.compare_digest(headers.get(b"authorization", b""), b"Bearer " + self._token):
            return None
        told = "authorization: Bearer and the token are wanted"
        return _refusal(401, told, "authorization", (b"www-authenticate", b"Bearer"))

    async def route(self, request: Request, encoding: Encoding) -> Reply | None:
        match request.method, request.path:
            case "POST", "/v1/admin/drain":
                asked = decode(encoding, request.body or _EMPTY[encoding], DrainBody)
                self._app.draining = asked.draining
                return Reply(200, encode(encoding, asked), encoding)
            case "POST", "/v1/admin/evict":
                user = decode(encoding, request.body, EvictBody).user
                user_key(user)
                return Reply(200, encode(encoding, await self._evict(user)), encoding)
            case "POST", "/v1/admin/swap" if self._swap is not None:
                model = decode(encoding, request.body, SwapBody).model
                return Reply(200, encode(encoding, await self._swap(model)), encoding)
        return None


_EMPTY: Final = {Encoding.JSON: b"{}", Encoding.MSGPACK: b"\x80"}


class Beside:
    """Two apps at one address: what begins with /v1/admin/ is for operators."""

    def __init__(self, app: App, admin: AdminApp) -> None:
        self._app, self._admin = app, admin

    def at(self, path: str) -> App:
        """Who answers there."""
        return self._admin if path.startswith(PREFIX) else self._app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """As ASGI has it."""
        return self.at(scope.get("path", ""))(scope, receive, send)


def evict_at_instance(engine: link.EngineCalls, slot: str) -> Evict:
    """From both tiers of this instance, and from what is in flight."""

    async def evict(user: str) -> EvictReply:
        return EvictReply(stored=None, prefixes={slot: await engine.call(link.Evict(user))})

    return evict


def swap_at_instance(engine: link.EngineCalls) -> Swap:
    async def swap(model: str) -> SwapReply:
        try:
            version, epoch = await engine.call(link.Swap(model))
        except InvalidInput as error:
            raise InvalidInput("model", error.problem if error.field in ("model", "path") else str(error)) from error
        return SwapReply(version=version, epoch=epoch)

    return swap


def evict_everywhere(
    store: HistoryStore,
    forget: Callable[[str], None],
    membership: Membership,
    token: bytes | None,
    connect: Callable[[str], Client] = HttpClient.to,
) -> Evict:
    """From the store, from what this gateway keeps, and from every instance. Unavailable where one does not answer: it
    may still hold the user, and evicting again, when it is back, does no harm. `connect` makes what carries messages to
    an address."""

    async def evict(user: str) -> EvictReply:
        stored = await asyncio.to_thread(store.delete, user)
        forget(user)
        members = membership.members()
        asked = await asyncio.gather(
            *(_ask(connect(m.address), user, token or b"") for m in members), return_exceptions=True
        )
        prefixes: dict[str, int] = {}
        failed = []
        for member, answer in zip(members, asked, strict=True):
            if isinstance(answer, RelayError | TimeoutError):
                failed.append(f"{member.slot} ({answer or 'no answer'})")
            elif isinstance(answer, BaseException):
                raise answer
            elif member.slot not in answer.prefixes:
                failed.append(f"{member.slot} ({', '.join(answer.prefixes) or 'nobody'} answered instead)")
            else:
                prefixes |= answer.prefixes
        forget(user)  # whoever was read between is forgotten, too
        if failed:
            raise Unavailable(f"the store has forgotten {shown(user)}, but not: {', '.join(failed)}; evict again")
        return EvictReply(stored=stored, prefixes=prefixes)

    return evict


async def _ask(client: Client, user: str, token: bytes) -> EvictReply:
    headers = {"content-type": Encoding.MSGPACK.value, "authorization": f"Bearer {token.decode()}"}
    try:
        async with asyncio.timeout(ASK_S):
            body = encode(Encoding.MSGPACK, EvictBody(user=user))
            reply = await client.request("POST", PREFIX + "evict", body, headers)
    finally:
        client.close()
    if reply.status != 200:
        raise Unavailable(f"answered {reply.status}")
    return decode(Encoding.MSGPACK, reply.body, EvictReply)


def _refusal(status: int, message: str, field: str | None = None, *headers: tuple[bytes, bytes]) -> Reply:
    body = encode(Encoding.JSON, ErrorReply(error="Forbidden", message=message, field=field))
    return Reply(status, body, headers=headers)
