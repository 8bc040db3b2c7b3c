"""Requests of users who come back: drawn once, sent at their times, whatever the answers do."""

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from relaygr import default
from relaygr.serving.client import HttpClient, Response
from relaygr.serving.wire import Behaviour, BehavioursBody, RecommendBody, RecommendReply

__all__ = ["LEAD_S", "Answer", "Traffic", "Visit", "ask", "replay", "returning"]

LEAD_S: Final = 0.5
"""How long before a request the behaviours are sent that it is to see."""
_JSON: Final = (("content-type", "application/json"),)


@dataclass(frozen=True)
class Visit:
    """One request, and what its user did since the last."""

    at: float
    """Seconds from the start."""
    user: str
    behaviours: tuple[Behaviour, ...]


@dataclass(frozen=True)
class Traffic:
    """An open loop: arrivals do not wait for answers."""

    users: int
    requests: int
    rate: float
    """Requests a second, on average; times between them are exponential."""
    new: int = 4
    """Behaviours that arrive between two visits of a user, at most."""
    newcomers: float = 0.0
    """The share of requests by users who are seen once, numbered from `users` and `after` on."""
    items: int = default.ITEMS
    seed: int = 0
    after: int = 0
    """Requests that other traffic has sent to the same servers: behaviours are newer than theirs, newcomers others."""

    def visits(self) -> list[Visit]:
        """The same for the same traffic. Nobody returns before half of the others have been there."""
        draw = np.random.default_rng(self.seed)
        at, seen, lately = 0.0, Counter[int](), deque[int](maxlen=self.users // 2)
        newcomers = itertools.count(self.users + self.after)
        visits = []
        for _ in range(self.requests):
            at += draw.exponential(1 / self.rate)
            if draw.random() < self.newcomers:
                visits.append(Visit(at, f"user-{next(newcomers)}", ()))
                continue
            user = int(draw.choice(np.setdiff1d(np.arange(self.users), np.array(lately, np.int64))))
            count = int(draw.integers(0, self.new + 1)) if seen[user] else 0
            items = draw.zipf(1.3, count) % self.items
            times = int(time.time()) + 3600 * (1 + self.after + seen[user])
            behaviours = tuple(Behaviour(int(item), 1, times + second) for second, item in enumerate(items))
            visits.append(Visit(at, f"user-{user}", behaviours))
            seen[user] += 1
            lately.append(user)
        return visits


def returning(visits: Sequence[Visit]) -> float:
    """The share of visits by users who were there before."""
    return 1 - len({visit.user for visit in visits}) / len(visits)


@dataclass(frozen=True)
class Answer:
    """What became of a visit."""

    visit: Visit
    status: int
    ms: float
    """From when it was to be sent until it was answered."""
    reply: RecommendReply | None
    """None where the status is not 200."""

    @property
    def scores(self) -> dict[int, float]:
        return {} if self.reply is None else {item.item: item.score for item in self.reply.items}


async def ask(client: HttpClient, user: str, k: int) -> Answer:
    """One request, now."""
    return await _visit(client, Visit(0.0, user, ()), time.monotonic(), k, None)


async def replay(
    client: HttpClient, visits: Sequence[Visit], k: int, progress: Callable[[], None] = lambda: None
) -> list[Answer]:
    """Send every visit at its time. A user's next visit begins when the last is answered: its wait counts as its own.

    So the histories that requests see are the same whatever the servers' speed.
    """
    start = time.monotonic() + LEAD_S
    last: dict[str, asyncio.Task[Answer]] = {}
    tasks = []
    for visit in visits:
        before = last.get(visit.user)
        task = asyncio.create_task(_visit(client, visit, start, k, before))
        task.add_done_callback(lambda _: progress())
        last[visit.user] = task
        tasks.append(task)
    return list(await asyncio.gather(*tasks))


async def _visit(
    client: HttpClient, visit: Visit, start: float, k: int, before: "asyncio.Task[Answer] | None"
) -> Answer:
    due = start + visit.at
    if before is not None:
        await asyncio.wait((before,))
    await _until(due - LEAD_S)
    if visit.behaviours:
        body = msgspec.json.encode(BehavioursBody(user=visit.user, behaviours=list(visit.behaviours)))
        stored = await client.request("POST", "/v1/behaviours", body, dict(_JSON))
        if stored.status != 200:
            return Answer(visit, stored.status, (time.monotonic() - due) * 1e3, None)
    await _until(due)
    body = msgspec.json.encode(RecommendBody(user=visit.user, k=k))
    response = await client.request("POST", "/v1/recommend", body, dict(_JSON))
    return Answer(visit, response.status, (time.monotonic() - due) * 1e3, _reply(response))


async def _until(when: float) -> None:
    await asyncio.sleep(max(0.0, when - time.monotonic()))


def _reply(response: Response) -> RecommendReply | None:
    return msgspec.json.decode(response.body, type=RecommendReply) if response.status == 200 else None
