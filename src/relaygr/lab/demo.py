"""The demonstration: the same requests of users who come back, served in full and by relay."""

import asyncio
import os
import shutil
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from relaygr.cascade.pipeline import PipelineConfig
from relaygr.errors import Unavailable
from relaygr.lab.estimates import percentile
from relaygr.lab.servers import Servers, serving
from relaygr.lab.traffic import Answer, Traffic, Visit, ask, replay, returning
from relaygr.serving.all import DEFAULTS
from relaygr.serving.modes import Mode, RelaySettings
from relaygr.serving.provision import World, provision
from relaygr.serving.settings import Settings

__all__ = ["MODES", "Demo", "DemoResult", "Replay", "run_demo"]

MODES: Final = (Mode.FULL, Mode.RELAY_HOST_EXTEND)
STAGES: Final = ("retrieval", "pre_processing", "ranking", "total")
_LONGEST_S: Final = 50.0
"""How long one replay may take; on a slow machine fewer requests are sent."""
_WARM: Final = 6
_TARGET_MS: Final = 5.0


@dataclass(frozen=True)
class Demo:
    """What is served, and how much of it."""

    requests: int = 240
    users: int = 24
    length: int = 3000
    """Behaviours of a user, about."""
    candidates: int = 128
    instances: int = 2
    retrieval_ms: float = 200.0
    """How long retrieval takes at least: a stand-in for one over millions of items."""
    load: float = 0.5
    """Requests arrive at this share of what the cores could compute in full."""
    seed: int = 0

    @property
    def world(self) -> World:
        """With some users more, to warm up."""
        return World(
            users=self.users + _WARM,
            typical=self.length,
            spread=0.05,
            longest=2 * self.length,
            seed=self.seed,
        )

    def settings(self, mode: Mode) -> Settings:
        """Those of `serve all`, with budgets that no request of either replay misses: times are compared, not cut.

        A signal is sent for whatever would take long beside a resident rank, however fast this machine is.
        """
        return replace(
            DEFAULTS,
            relay=RelaySettings(mode),
            trigger=replace(DEFAULTS.trigger, target_ms=_TARGET_MS),
            cascade=PipelineConfig(
                pipeline_ms=20_000 + self.retrieval_ms + 50, ranking_ms=20_000, candidates=self.candidates
            ),
            gateway=replace(DEFAULTS.gateway, retrieval_at_least_ms=self.retrieval_ms),
            engine=replace(DEFAULTS.engine, on_miss="full"),
        )


@dataclass(frozen=True)
class Replay:
    """What came of one replay."""

    mode: Mode
    stages_ms: Mapping[str, Mapping[str, float]]
    """P50 and P99 of every stage, as the gateway measured it."""
    answered_ms: Mapping[str, float]
    """P50 and P99 from when a request was to be sent until it was answered."""
    paths: Mapping[str, int]
    decisions: Mapping[str, int]
    reuse: float
    """The share of requests whose prefix was not computed from nothing."""
    failed: int


@dataclass(frozen=True)
class DemoResult:
    demo: Demo
    requests: int
    rate: float
    """Requests a second."""
    returning: float
    """The share of requests by users who were there before."""
    replays: Sequence[Replay]
    difference: float
    """Largest difference between the scores of the two replays."""
    allowed: float
    """What float32 rounding allows there."""

    @property
    def ranking_p50_ratio(self) -> float:
        """How many times longer ranking takes in full, in the middle."""
        return self._ranking_ratio("p50")

    @property
    def ranking_p99_ratio(self) -> float:
        """The same at P99."""
        return self._ranking_ratio("p99")

    def _ranking_ratio(self, quantile: str) -> float:
        full, relay = (replay.stages_ms["ranking"][quantile] for replay in self.replays)
        return full / relay


Progress = Callable[[str, int, int], None]
"""What is being done, how many requests of it are, and of how many."""


async def run_demo(demo: Demo, progress: Progress = lambda what, done, total: None) -> DemoResult:
    """Start the servers in one mode after the other on copies of the same data, and send both the same requests.

    How many a second is decided in `full`, before anything is counted. Raises Unavailable where requests fail.
    """
    with tempfile.TemporaryDirectory(prefix="relaygr-demo-") as folder:
        data = Path(folder)
        progress("making a model, items and users", 0, 0)
        await asyncio.to_thread(provision, data / "world", world=demo.world)
        visits: list[Visit] = []
        replays, answers = [], []
        for mode in MODES:
            shutil.copytree(data / "world", data / mode)
            progress(f"starting a gateway and {demo.instances} instances: {mode}", 0, 0)
            async with serving(demo.settings(mode), data / mode, demo.instances) as servers:
                alone_s = await _warm_up(demo, servers)
                visits = visits or _visits(demo, alone_s)
                given = await _replay(demo, servers, mode, visits, progress)
                replays.append(await _summary(mode, servers, given))
                answers.append(given)
        difference, allowed = _largest_difference(*answers)
        rate = len(visits) / visits[-1].at
        return DemoResult(demo, len(visits), rate, returning(visits), replays, difference, allowed)


async def _warm_up(demo: Demo, servers: Servers) -> float:
    """Seconds a rank takes by itself, of users who are not seen again."""
    taken = []
    for number in range(_WARM):
        answer = await ask(servers.client, f"user-{demo.users + number}", demo.candidates)
        if answer.reply is None:
            raise Unavailable(f"a request was answered {answer.status}")
        taken.append(answer.reply.stages_ms["ranking"] / 1e3)
    return statistics.median(taken)


def _visits(demo: Demo, alone_s: float) -> list[Visit]:
    """As many as fit into the time there is."""
    cores = min(demo.instances, len(os.sched_getaffinity(0)))
    rate = demo.load * cores / alone_s
    requests = max(demo.users, min(demo.requests, int(rate * _LONGEST_S)))
    return Traffic(demo.users, requests, rate, seed=demo.seed).visits()


async def _replay(
    demo: Demo, servers: Servers, mode: Mode, visits: Sequence[Visit], progress: Progress
) -> list[Answer]:
    done = 0

    def one() -> None:
        nonlocal done
        done += 1
        progress(mode, done, len(visits))

    progress(mode, 0, len(visits))
    return await replay(servers.client, visits, demo.candidates, one)


async def _summary(mode: Mode, servers: Servers, answers: Sequence[Answer]) -> Replay:
    replies = [answer.reply for answer in answers if answer.reply is not None]
    if not replies:
        raise Unavailable(f"no request was answered: {Counter(answer.status for answer in answers)}")
    stages = {stage: [reply.stages_ms[stage] for reply in replies] for stage in STAGES}
    told = (await servers.instances()).values()
    ranks = sum(sum(status["engine"]["paths"].values()) for status in told)
    made = sum(status["counts"]["sources"].get("NOTHING", 0) for status in told)
    return Replay(
        mode=mode,
        stages_ms={stage: _quantiles(values) for stage, values in stages.items()},
        answered_ms=_quantiles([answer.ms for answer in answers if answer.reply is not None]),
        paths=dict(Counter(str(reply.path) for reply in replies)),
        decisions=dict(Counter(reply.decision for reply in replies)),
        reuse=1 - (made - _WARM) / (ranks - _WARM),
        failed=len(answers) - len(replies),
    )


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    return {"p50": percentile(values, 50), "p99": percentile(values, 99)}


def _largest_difference(full: Sequence[Answer], relay: Sequence[Answer]) -> tuple[float, float]:
    """Of scores for the same request and item, with what rounding allows for the request's largest score."""
    worst = 0.0, 1.0
    for one, other in zip(full, relay, strict=True):
        if not one.scores or not other.scores:
            continue
        if one.scores.keys() != other.scores.keys():
            raise Unavailable(f"a request of {one.visit.user} was ranked on other items in the two replays")
        allowed = 1e-5 * max(1.0, *map(abs, one.scores.values()))
        difference = max(abs(score - other.scores[item]) for item, score in one.scores.items())
        worst = max(worst, (difference, allowed), key=lambda pair: pair[0] / pair[1])
    return worst
