"""A trace sent to a gateway over HTTP. Stage times are the servers' own: those of the trace are not used."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from relaygr.errors import InvalidInput, Unavailable
from relaygr.history import History
from relaygr.lab.histories import Histories
from relaygr.lab.outcome import Run
from relaygr.lab.records import Record
from relaygr.lab.run import Sample
from relaygr.lab.servers import Servers
from relaygr.lab.trace import Trace
from relaygr.lab.traffic import LEAD_S, Answer, Visit, replay
from relaygr.serving.modes import Mode
from relaygr.serving.wire import Behaviour, BehavioursBody, ErrorReply

__all__ = ["replay_over_http"]

_AT_ONCE: Final = 8
_BATCH: Final = 2000
"""Behaviours of one message."""
_JSON: Final = (("content-type", "application/json"),)


async def replay_over_http(
    address: str,
    trace: Trace,
    mode: Mode,
    histories: Histories,
    name: str = "lab",
    progress: Callable[[str, int, int], None] = lambda what, done, of: None,
    samples: list[Sample] | None = None,
    sampled: int = 0,
) -> Run:
    """Write the users' histories, then send every request at its time. The servers are in `mode` by their settings.

    Users are called `name`-0, `name`-1 …: nobody of that name may be there before. A user's request waits for the one
    before, and its wait counts as its own. Raises Unavailable where the gateway is not reached or refuses behaviours.
    """
    servers = Servers(address)
    try:
        await _write(servers, trace, histories, name, progress)
        visits = list(_visits(trace, histories, name))
        done = 0

        def one() -> None:
            nonlocal done
            done += 1
            progress("requests", done, len(visits))

        begun = asyncio.create_task(_counts_at(servers, LEAD_S - float(trace.at[0]) if len(trace) else 0.0))
        answers = await replay(servers.client, visits, int(trace.candidates.max(initial=1)), one)
        before, after = await begun, await _counts(servers)
    finally:
        servers.client.close()
    run = Run(mode)
    every = max(1, int((trace.at >= 0).sum()) // sampled) if sampled else 0
    for index, answer in enumerate(answers):
        if trace.at[index] >= 0:
            run.records.append(_record(trace, index, answer, mode))
            if samples is not None and every and index % every == 0 and answer.reply is not None and answer.scores:
                samples.append(_sample(trace, index, answer, histories))
    if run.requests:
        run.reused = max(0.0, 1 - (after.made - before.made) / run.requests)
        run.resident_left = max(after.left - before.left, 0)
        device_s = max((after.at - before.at) * after.instances, 1e-9)
        run.device_busy = max(after.busy_s - before.busy_s, 0.0) / device_s  # an instance may have begun anew
        run.pre_infer_share = max(after.pre_infer_s - before.pre_infer_s, 0.0) / device_s
    return run


async def _write(
    servers: Servers, trace: Trace, histories: Histories, name: str, progress: Callable[[str, int, int], None]
) -> None:
    """What users had done before their first request."""
    _, first = np.unique(trace.user, return_index=True)
    queue = iter(first.tolist())
    done = 0

    async def worker() -> None:
        nonlocal done
        for index in queue:
            user, length = int(trace.user[index]), int(trace.length[index])
            history = histories.of(user, length)
            for low in range(0, length, _BATCH):
                body = BehavioursBody(user=f"{name}-{user}", behaviours=_behaviours(history[low : low + _BATCH]))
                told = await servers.client.request("POST", "/v1/behaviours", msgspec.json.encode(body), dict(_JSON))
                if (
                    told.status == 400
                    and msgspec.json.decode(told.body, type=ErrorReply).field == "behaviours.timestamp"
                ):
                    raise InvalidInput("name", f"users {name}-… are in the store from an earlier run: give another")
                if told.status != 200:
                    raise Unavailable(f"behaviours were answered {told.status}: {told.body[:200]!r}")
            done += 1
            progress("histories", done, len(first))

    await asyncio.gather(*(worker() for _ in range(_AT_ONCE)))


def _behaviours(history: History) -> list[Behaviour]:
    columns = (history.items.tolist(), history.actions.tolist(), history.timestamps.tolist())
    return [Behaviour(*row) for row in zip(*columns, strict=True)]


def _visits(trace: Trace, histories: Histories, name: str) -> Iterator[Visit]:
    start = float(trace.at[0]) if len(trace) else 0.0
    seen: dict[int, int] = {}
    for index in range(len(trace)):
        user, length = int(trace.user[index]), int(trace.length[index])
        new = _behaviours(histories.of(user, length)[seen.get(user, length) :])
        seen[user] = length
        yield Visit(float(trace.at[index]) - start, f"{name}-{user}", tuple(new))


class _Counts(NamedTuple):
    """Of all instances together, at a moment."""

    at: float
    instances: int
    made: int
    """Prefixes begun from nothing."""
    left: int
    """Resident ones that an earlier request had left."""
    busy_s: float
    pre_infer_s: float


async def _counts_at(servers: Servers, after_s: float) -> _Counts:
    await asyncio.sleep(after_s)
    return await _counts(servers)


async def _counts(servers: Servers) -> _Counts:
    told: list[dict[str, Any]] = list((await servers.instances()).values())
    return _Counts(
        time.monotonic(),
        len(told),
        sum(status["counts"]["sources"].get("NOTHING", 0) for status in told),
        sum(status["engine"]["resident_left_by_earlier"] for status in told),
        sum(status["engine"]["device_busy_s"] for status in told),
        sum(status["counts"]["pre_infer_busy_s"] for status in told),
    )


def _record(trace: Trace, index: int, answer: Answer, mode: Mode) -> Record:
    reply = answer.reply
    path = (reply.path or "") if reply is not None else ""
    failure = "" if reply is not None else f"HTTP {answer.status}"
    if path == "TRUNCATED" and mode is not Mode.TRUNCATE:
        failure = path
    return Record(
        at=float(trace.at[index]),
        user=int(trace.user[index]),
        visit=int(trace.visit[index]),
        length=int(trace.length[index]),
        decision=reply.decision if reply is not None else "",
        path=path,
        failure=failure,
        ranking_ms=reply.stages_ms["ranking"] if reply is not None else answer.ms,
        pipeline_ms=answer.ms,
        late_in_full=False,
    )


def _sample(trace: Trace, index: int, answer: Answer, histories: Histories) -> Sample:
    assert answer.reply is not None
    history = histories.of(int(trace.user[index]), int(trace.length[index]))
    items = np.array([item.item for item in answer.reply.items])
    scores = np.array([[item.score] for item in answer.reply.items], np.float32)
    return Sample(history[len(history) - answer.reply.used :], items, scores, answer.reply.path or "")
