"""Ranking by instances: the trigger's question, the router's choice, and the messages between."""

import asyncio
import contextlib
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from relaygr.cascade.stage import RankReply as StageReply
from relaygr.cascade.stage import Signal
from relaygr.clock import Clock
from relaygr.engine import Decision, Path, Timings
from relaygr.errors import DeadlineExceeded, InvalidInput, Overloaded, RelayError, Unavailable
from relaygr.history import History
from relaygr.model import Candidates
from relaygr.relay import Evidence, Forecast, Health, Membership, Route, Router, Shape, SlotReport, Trigger
from relaygr.serving.client import Client, HttpClient, Response
from relaygr.serving.wire import (
    Behaviours,
    Encoding,
    ErrorReply,
    PreInferBody,
    PreInferReply,
    RankBody,
    RankReply,
    decode,
    encode,
)

__all__ = ["PROBE_S", "RelayRanking"]

TAIL: Final = 64
"""The newest behaviours that a message carries; what is older the instance finds cached or in the store."""
PROBE_S: Final = 0.5
CONFLICT: Final = 409
LATE_S: Final = 1e-3
"""How close to its deadline a rank that was given up counts as late."""
EXPECTED: Final = 10_000
"""Requests that were not at risk and have not been ranked yet, remembered at most."""
_PRE_INFER_REPLY: Final = msgspec.msgpack.Decoder(PreInferReply)
_RANK_REPLY: Final = msgspec.msgpack.Decoder(RankReply)
_NOT_UNDERSTOOD: Final = (ValueError, TypeError, InvalidInput)
"""What decoding an answer may raise; msgspec's errors are ValueErrors."""


class RelayRanking:
    """Signals and ranks over HTTP, to the slots of a membership. An async context manager: it probes them meanwhile.

    A rank goes where its signal went while that slot lives. A slot that cannot be reached costs a retry elsewhere,
    never the request, as long as another is up and the deadline allows.
    """

    def __init__(
        self,
        membership: Membership,
        router: Router,
        trigger: Trigger,
        clock: Clock,
        *,
        connect: Callable[[str], Client] = HttpClient.to,
        probe_s: float = PROBE_S,
    ) -> None:
        """`connect` makes the client for an address: a seam for tests and simulation. `probe_s`: how often slots are
        asked how they are, and how long they may take to say."""
        self.membership = membership
        self.router = router
        self.trigger = trigger
        self.retries: Counter[str] = Counter()
        """Messages sent again, by why."""
        self.actions: dict[str, int] = {}
        """How many the model of each slot knows, as it last said."""
        self._expected: OrderedDict[str, Forecast] = OrderedDict()
        """Of users whose request was not at risk: what was expected of it."""
        self._clock = clock
        self._clients: dict[str, Client] = {}
        self._connect = connect
        self._probe_s = probe_s
        self._probing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "RelayRanking":
        await self.probe()
        self._probing = asyncio.create_task(self._probe_on())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        for client in self._clients.values():
            client.close()

    # ---- the gateway's questions

    def check_actions(self, actions: npt.NDArray[np.int64]) -> None:
        """That the models behind the slots know these. InvalidInput otherwise; Unavailable if no slot was ever up."""
        if not self.actions:
            raise Unavailable("no instance has said which actions there are")
        up = [count for slot, count in self.actions.items() if self.membership.health(slot) is not Health.DOWN]
        limit = min(up or self.actions.values())
        if actions.size and int(actions.max()) >= limit:
            at = int(actions.argmax())
            problem = f"must be below {limit}, the model's number of actions; entry {at} is {actions[at]}"
            raise InvalidInput("actions", problem)

    # ---- the pipeline's questions

    def decide(self, user: str, shape: Shape) -> Decision:
        """Whether the user's request is worth a signal to the slot it would go to."""
        try:
            slot = self.router.peek(user, shape.prefix)
        except Unavailable:
            slot = None
        verdict = self.trigger.decide(slot, shape, self._clock.now())
        self._expected.pop(user, None)
        if verdict.decision is Decision.NOT_AT_RISK and verdict.forecast is not None:
            self._expected[user] = verdict.forecast
            if len(self._expected) > EXPECTED:
                self._expected.popitem(last=False)
        return verdict.decision

    async def signal(self, user: str, history: History, context: Any, *, due: float) -> Signal:
        """Place the request and ask for its prefix. The slot stays charged with it until the rank is due."""
        route = self.router.place(user, len(history))
        left, loop = max(due - self._clock.now(), 0.0), asyncio.get_running_loop()
        loop.call_soon(loop.call_later, left, route.release)  # a timer that the message need not wait for
        body = PreInferBody(**_history_fields(user, history, context))
        response = await self._send(route, "/v1/pre-infer", user, body, history, due)
        content = _well(response, 202)
        try:
            reply = _PRE_INFER_REPLY.decode(content)
            signal = Signal(Decision(reply.decision), reply.slot)
        except _NOT_UNDERSTOOD as error:
            raise self._strange(route, error) from error
        self.trigger.hear_wait(reply.slot, reply.wait_ms, self._clock.now())
        return signal

    async def rank(
        self,
        user: str,
        history: History,
        candidates: Candidates,
        context: Any,
        request: npt.NDArray[np.float32] | None,
        *,
        slot: str | None,
        deadline: float,
    ) -> StageReply:
        """Rank at the slot, or where the user belongs; elsewhere if that fails and another is up."""
        body = RankBody(
            **_history_fields(user, history, context),
            candidates=candidates.items.tobytes(),
            features=None if candidates.features is None else candidates.features.tobytes(),
            request=None if request is None else request.tobytes(),
        )
        shape = Shape(len(history), 0 if context is None else len(context), len(candidates))
        signalled = slot is not None
        for attempt in itertools.count():
            tokens = len(history) + len(candidates)
            route = self.router.follow(slot, user, tokens) if slot else self.router.place(user, tokens)
            began = self._clock.now()
            # What let it go unsignalled is what is learned from: the device may have become busier since.
            forecast = self._expected.pop(user, None) or self.trigger.forecast(route.slot, shape, began)
            with route:
                try:
                    response = await self._send(route, "/v1/rank", user, body, history, deadline)
                    content = _well(response, 200)
                    try:
                        reply, told = _ranked(content)
                    except _NOT_UNDERSTOOD as error:
                        raise self._strange(route, error) from error
                except Unavailable:
                    if attempt >= len(self.membership) or self._clock.now() >= deadline:
                        raise
                    self.retries["unavailable"] += 1
                    slot = None
                    continue
                except Overloaded:
                    left_ms = (deadline - began) * 1e3  # it would have taken longer than that
                    if forecast is not None and not signalled and left_ms > forecast.wait_ms + forecast.full_ms:
                        self.trigger.learn(forecast, Path.FULL, left_ms)
                    raise
                except (DeadlineExceeded, asyncio.CancelledError):
                    late = self._clock.now() >= deadline - LATE_S  # whoever gave it up; else its client has gone
                    if late and forecast is not None and not signalled:  # on its own, and it took longer than this
                        self.trigger.learn(forecast, Path.FULL, (self._clock.now() - began) * 1e3)
                    raise
            # What is learned from it is for later requests: in the loop's next turn, when this one is answered.
            now = self._clock.now()
            asyncio.get_running_loop().call_soon(self._learn, told, reply.path, forecast, began, now)
            return reply
        raise AssertionError("unreachable")

    def _learn(self, told: RankReply, path: Path, forecast: Forecast | None, began: float, now: float) -> None:
        """A rank was answered `now`."""
        self.trigger.hear_wait(told.slot, told.wait_ms, now)
        if forecast is not None:
            self.trigger.learn(forecast, path, (now - began) * 1e3)

    # ---- messages

    async def _send(
        self, route: Route, path: str, user: str, body: PreInferBody, history: History, deadline: float
    ) -> Response:
        """One message to a slot; again with the whole history if its store has another. Tells the membership."""
        response = await self._post(route, path, user, body, deadline)
        if response.status == CONFLICT:
            self.retries["conflict"] += 1
            body.behaviours = _behaviours(history)
            response = await self._post(route, path, user, body, deadline)
        return response

    async def _post(self, route: Route, path: str, user: str, body: PreInferBody, deadline: float) -> Response:
        left_ms = (deadline - self._clock.now()) * 1e3
        if left_ms <= 0:
            raise DeadlineExceeded("the deadline passed before the message was sent")
        headers = {
            "content-type": Encoding.MSGPACK.value,
            "x-relaygr-key": user.encode("unicode_escape").decode("ascii"),
            "x-relaygr-deadline-ms": f"{left_ms:.3f}",
        }
        try:
            response = await self._client(route.address).request("POST", path, encode(Encoding.MSGPACK, body), headers)
        except Unavailable as error:
            self.membership.observe(route.slot, _evidence(error))
            raise
        self.membership.observe(route.slot, Evidence.ANSWERED)
        if response.status == 503:
            self.membership.observe(route.slot, Evidence.DRAINING)
        return response

    def _strange(self, route: Route, error: Exception) -> Unavailable:
        """An answer that cannot be understood is none: of another version, or of something else at that address."""
        self.membership.observe(route.slot, Evidence.REFUSED)
        return Unavailable(f"{route.slot} answered what is not understood here: {error}")

    def _client(self, address: str) -> Client:
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = self._connect(address)
        return client

    # ---- probes

    async def _probe_on(self) -> None:
        while True:
            await asyncio.sleep(self._probe_s)
            await self.probe()

    async def probe(self) -> None:
        """Ask every slot how it is. Of those that have left nothing is kept."""
        members = self.membership.members()
        for address in self._clients.keys() - {member.address for member in members}:
            self._clients.pop(address).close()
        for slot in self.actions.keys() - {member.slot for member in members}:
            del self.actions[slot]
        await asyncio.gather(*(self._probe(member.slot, member.address) for member in members))

    async def _probe(self, slot: str, address: str) -> None:
        try:
            async with asyncio.timeout(self._probe_s):
                response = await self._client(address).request("GET", "/v1/status")
            status = msgspec.json.decode(response.body)
            if response.status != 200 or status["slot"] != slot:
                raise Unavailable(f"{address} is not {slot}")
            engine = status["engine"]
            report = SlotReport(
                engine["cost_model_version"], tuple(engine["cost_model"]["steps"]), float(engine["wait_ms"])
            )
            actions, draining = int(engine["actions"]), bool(status["draining"])
        except (Unavailable, TimeoutError, KeyError, TypeError, ValueError, InvalidInput) as error:
            self.membership.observe(slot, _evidence(error))
            return
        self.actions[slot] = actions
        self.trigger.hear(slot, report, self._clock.now())
        self.membership.observe(slot, Evidence.DRAINING if draining else Evidence.READY)


def _ranked(content: bytes) -> tuple[StageReply, RankReply]:
    """What an instance ranked, and all that it told."""
    told = _RANK_REPLY.decode(content)
    timings = Timings(**told.timings_ms)
    return StageReply(told.to_array(), Path(told.path), told.used, told.epoch, told.slot, timings), told


def _evidence(error: BaseException) -> Evidence:
    return Evidence.REFUSED if isinstance(error.__cause__, ConnectionRefusedError) else Evidence.FAILED


def _history_fields(user: str, history: History, context: Any) -> dict[str, Any]:
    return {
        "user": user,
        "start": history.start,
        "length": len(history),
        "digest": history.digest(),
        "behaviours": _behaviours(history, max(0, len(history) - TAIL)),
        "context": b"" if context is None else np.asarray(context, np.int64).tobytes(),
    }


def _behaviours(history: History, first: int = 0) -> Behaviours:
    """Those from `first` on."""
    columns = history.items[first:], history.actions[first:], history.timestamps[first:]
    return Behaviours(*[column.tobytes() for column in columns])


_ERRORS: Final[dict[int, type[RelayError]]] = {429: Overloaded, 504: DeadlineExceeded, 503: Unavailable}


def _well(response: Response, status: int) -> bytes:
    """The body of a reply with this status; the error it carries otherwise."""
    if response.status == status:
        return response.body
    message, field = f"an instance answered {response.status}", None
    with contextlib.suppress(InvalidInput):
        encoding = Encoding.MSGPACK if "msgpack" in response.headers.get("content-type", "") else Encoding.JSON
        told = decode(encoding, response.body, ErrorReply)
        message, field = told.message, told.field
    if response.status == 400:
        raise InvalidInput(field or "body", message.removeprefix(f"{field}: "))
    raise _ERRORS.get(response.status, Unavailable)(message)
