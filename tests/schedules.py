"""Random schedules of whole engines in virtual time: everything that can happen, in any order, with faults.

`python tests/schedules.py SEED [--torch]` replays one and prints what happened.
"""

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from engines import weigh_at_random
from oracle import oracle_scores
from relaygr import Engine, EngineConfig, History, PreInferOutcome, Ranked, SteppedWindow
from relaygr.clock import VirtualClock, VirtualTimeLoop, run_virtual
from relaygr.engine.cpu_runner import CpuRunner
from relaygr.engine.faults import Faults, FaultyExecutor
from relaygr.engine.simulated import SimulatedCosts, SimulatedExecutor, SimulatedModel, simulated_scores
from relaygr.engine.step import Capacity, Executor, Model, PageCopy, Served, Step
from relaygr.engine.torch_executor import TorchExecutor
from relaygr.errors import DeadlineExceeded, Overloaded, Unavailable
from relaygr.history import PAGE
from relaygr.model import RankingModel, build_model
from relaygr.model.config import Family

Ids = npt.NDArray[np.int64]

PAGE_BYTES = 1024
STEP_SLACK_S = 0.05
"""More than any one step of these schedules takes."""


class TorchInVirtualTime(SimulatedExecutor):
    """Real models and real pages; only the time that passes is simulated."""

    def __init__(self, costs: SimulatedCosts, *, depth: int, seed: int) -> None:
        super().__init__(costs, page_bytes=1, depth=depth, seed=seed)
        self._torch = TorchExecutor()

    def open(self, model: Model, config: EngineConfig) -> Capacity:
        capacity = self._torch.open(model, config)
        assert isinstance(self._torch._runner, CpuRunner)
        self._runner = self._torch._runner
        self._runner.pages.fill_(float("nan"))
        self._runner.host_pages.fill_(float("nan"))
        return capacity

    @property
    def host_pages(self) -> int:
        return self._torch.host_pages

    async def prepare(self, model: Model) -> Served:
        return self._torch._prepare(model)[0]

    def close(self) -> None:
        self._torch.close()

    def _run(self, step: Step) -> list[npt.NDArray[np.float32]]:
        return self._runner.run(step).scores

    def copy(self, copy: PageCopy) -> "asyncio.Future[float]":
        seconds = self._costs.copy + self._costs.page * len(copy.source)
        self._announce(copy, seconds)
        return self._after(copy.direction, seconds, lambda: self._runner.move(copy) * 0 + seconds)


@dataclass
class Report:
    """What one schedule did, for tests that sum them up."""

    paths: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    shortened: int = 0
    """How often a prefix lost a part of its head, in either tier."""
    worst: float = 0.0
    """Largest difference to the right scores, as a share of the tolerance."""


class Schedule:
    """One engine, a few users, and a seeded sequence of what happens to them."""

    def __init__(self, seed: int, *, torch: bool, faulty: bool, verbose: bool = False) -> None:
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.seed = seed
        self.torch = torch
        self.faulty = faulty
        self.verbose = verbose
        self.report = Report()
        self.tasks: list[asyncio.Task[None]] = []
        self.failures: list[BaseException] = []
        self.closing = False
        self.longest = self.random.choice((200, 300, 420))
        self.histories: dict[str, History] = {}
        self.contexts: dict[str, Ids] = {}
        self.models = 0
        self.model = self._new_model()

    # ---- what there is

    def _new_model(self, *, epoch: int = 0) -> Any:
        self.models += 1
        if not self.torch:
            return SimulatedModel(f"model {self.models}", epoch=epoch, actions=4, tasks=2)
        family: Family = self.random.choice(("hstu", "softmax"))
        return build_model(
            family,
            layers=2,
            dim=16,
            heads=2,
            items=50,
            actions=4,
            tasks=2,
            request_features=2,
            seed=self.seed + self.models,
        )

    def _config(self) -> EngineConfig:
        reserve = -(-(self.longest + 64) // PAGE) + 1
        device = reserve + self.random.choice((0, 2, 4, 8, 16))
        host = self.random.choice((0, 6, 30))
        page = PAGE_BYTES if not self.torch else self.model.layout.bytes
        return EngineConfig(
            device_cache=f"{device * page}B",
            host_cache=f"{host * page}B",
            max_history=self.longest,
            on_miss=self.random.choice(("full", "truncate")),
            lease_s=self.random.choice((0.02, 0.2)),
            accept_epochs=self.random.choice((0, 0, 1)) if not self.torch else 0,
            lease_share=self.random.choice((0.5, 1.0)),
            pre_infer_share=self.random.choice((0.3, 1.0)),
            step_ms=self.random.choice((0.3, 2.0)),
            write_back_queue=self.random.choice((1, 8)),
        )

    def _executor(self) -> Executor:
        speed = self.random.choice((1.0, 10.0))
        costs = SimulatedCosts(step=2e-4, token=speed * 5e-6, pair=speed * 1e-8, candidate=1e-6, candidate_pair=1e-9)
        depth = self.random.choice((1, 2, 3))
        inner: Executor
        if self.torch:
            inner = TorchInVirtualTime(costs, depth=depth, seed=self.seed)
        else:
            inner = SimulatedExecutor(costs, page_bytes=PAGE_BYTES, depth=depth, seed=self.seed)
        if not self.faulty:
            return inner
        rate = self.random.choice((0.02, 0.1, 0.25))
        faults = Faults(refuse=rate / 4, fail=rate / 2, fail_after=rate / 2, delay=rate, hang=rate / 8, hang_s=2.0)
        return FaultyExecutor(inner, faults, self.seed)

    def _behaviours(self, count: int, after: int = 0) -> tuple[Ids, Ids, Ids]:
        draw = self.numbers
        times = after + np.cumsum(draw.integers(0, 900, count))
        return draw.integers(0, 80, count), draw.integers(0, 4, count), times

    def _user(self) -> str:
        user = f"user {self.random.randrange(4)}"
        if user not in self.histories:
            self.histories[user] = History(*self._behaviours(self.random.choice((0, 1, 100, 127, 128, 180))))
            self.contexts[user] = self.numbers.integers(0, 90, self.random.choice((0, 0, 3, 20)))
        return user

    # ---- what happens

    def grow(self, user: str) -> None:
        history = self.histories[user]
        last = int(history.timestamps[-1]) if len(history) else 0
        history = history.append(*self._behaviours(self.random.choice((1, 2, 17, 128)), last))
        self.histories[user] = SteppedWindow(cap=self.longest, step=PAGE).apply(history)

    def correct(self, user: str) -> None:
        """An old behaviour turns out to have been another."""
        history = self.histories[user]
        if len(history):
            items = history.items.copy()
            items[self.random.randrange(len(items))] += 1
            self.histories[user] = History(items, history.actions, history.timestamps, start=history.start)

    def start(self, call: Callable[[Engine, str], Coroutine[Any, Any, None]], engine: Engine, user: str) -> None:
        async def guarded() -> None:
            try:
                await call(engine, user)
            except asyncio.CancelledError:
                self.report.errors["cancelled"] += 1
            except BaseException as error:
                if not (self.closing and isinstance(error, Unavailable)):
                    self.failures.append(error)

        task = asyncio.create_task(guarded())
        self.tasks.append(task)

    def deadline(self, engine: Engine) -> float | None:
        wait = self.random.choice((None, 0.001, 0.005, 0.02, 0.1, 0.5))
        return None if wait is None else engine.clock.now() + wait

    async def rank(self, engine: Engine, user: str) -> None:
        model, history, context = self.model, self.histories[user], self.contexts[user]
        candidates = self.numbers.integers(0, 80, self.random.choice((1, 3, 20)))
        request = self.numbers.random(2).astype(np.float32) if self.torch else None
        deadline = self.deadline(engine)
        try:
            ranked = await engine.rank(user, history, candidates, context=context, request=request, deadline=deadline)
        except (DeadlineExceeded, Overloaded) as error:
            self.report.errors[type(error).__name__] += 1
            assert deadline is not None, "no deadline was set"
        except Unavailable:
            self.report.errors["Unavailable"] += 1
            assert self.faulty or self.closing, "nothing failed"
        else:
            self.check(model, history, context, candidates, request, ranked, engine)
        finally:
            if deadline is not None:
                assert engine.clock.now() <= deadline + STEP_SLACK_S, "the call outlived its deadline"

    def check(
        self, model: Any, history: History, context: Ids, candidates: Ids, request: Any, ranked: Ranked, engine: Engine
    ) -> None:
        self.report.paths[ranked.path] += 1
        if ranked.path == "TRUNCATED":
            assert engine.config.on_miss == "truncate"
            history = history[len(history) - ranked.used :]
        assert ranked.used == len(history)
        if ranked.epoch != model.epoch:
            assert 0 < model.epoch - ranked.epoch <= engine.config.accept_epochs
            return
        if isinstance(model, RankingModel):
            right = oracle_scores(model, history, candidates, context=context, request=request)
            allowed = 1e-5 * max(1.0, float(np.abs(right).max()))
            difference = float(np.abs(ranked.scores - right).max())
            self.report.worst = max(self.report.worst, difference / allowed)
            assert difference <= allowed, (
                f"{ranked.path} on {ranked.used}: off by {difference:.2e}, allowed {allowed:.2e}"
            )
        else:
            exact = simulated_scores(model, history, candidates, context)
            assert np.array_equal(ranked.scores, exact), f"a wrong score by {ranked.path}"

    async def pre_infer(self, engine: Engine, user: str) -> None:
        deadline = self.deadline(engine)
        outcome = await engine.pre_infer(user, self.histories[user], context=self.contexts[user], deadline=deadline)
        self.report.outcomes[outcome] += 1
        if deadline is not None:
            assert engine.clock.now() <= deadline + STEP_SLACK_S, "the call outlived its deadline"
        assert isinstance(outcome, PreInferOutcome)

    async def swap(self, engine: Engine) -> None:
        model: Any
        if self.torch:
            model = build_model(
                self.model.config.family,
                **{k: v for k, v in self.model.config.to_dict().items() if k in ("layers", "dim", "heads", "items")},
                actions=4,
                tasks=2,
                request_features=2,
                seed=self.seed + 100 + self.models,
            )
            self.models += 1
        elif self.random.random() < 0.5:
            model = SimulatedModel(self.model.name, epoch=self.model.epoch + 1, actions=4, tasks=2)
        else:
            model = self._new_model()
        await engine.swap_model(model)
        self.model = model

    async def act(self, engine: Engine) -> None:
        user = self._user()
        action = self.random.choices(
            ("rank", "pre_infer", "request", "grow", "correct", "context", "evict", "swap", "cancel", "sleep"),
            (30, 14, 12, 14, 4, 2, 3, 2, 5, 14),
        )[0]
        if self.verbose:
            print(f"{engine.clock.now():9.4f} {action:9} {user} {self.histories[user]}")  # noqa: T201
        match action:
            case "rank":
                for _ in range(self.random.choice((1, 1, 1, 4))):
                    self.start(self.rank, engine, user)
            case "pre_infer":
                self.start(self.pre_infer, engine, user)
            case "request":
                self.start(self.pre_infer, engine, user)
                await asyncio.sleep(self.random.choice((0.0, 0.002, 0.01)))
                self.start(self.rank, engine, user)
            case "grow":
                self.grow(user)
            case "correct":
                self.correct(user)
            case "context":
                self.contexts[user] = self.numbers.integers(0, 90, self.random.choice((0, 3, 20)))
            case "evict":
                await engine.evict(user)
            case "swap":
                await self.swap(engine)
            case "cancel" if self.tasks:
                self.random.choice(self.tasks[-6:]).cancel()
            case _:
                await asyncio.sleep(self.random.choice((0.0, 0.001, 0.01, 0.3)))

    async def run(self, actions: int) -> Report:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        executor = self._executor()
        if isinstance(executor, FaultyExecutor):
            executor.active = False
        engine = Engine(self.model, self._config(), clock=VirtualClock(loop), executor=executor)
        async with engine:
            if isinstance(executor, FaultyExecutor):
                executor.active = True
            if self.seed % 3:
                weigh_at_random(engine, self.seed)
            for _ in range(actions):
                await self.act(engine)
                if self.random.random() < 0.5:
                    await asyncio.sleep(self.random.choice((0.0, 0.0005, 0.003)))
                assert engine._loop is not None
                engine._loop.tier.pool.check()
                engine._loop.host.pool.check()
                if self.failures:
                    break
            if self.random.random() < 0.8:  # else close on top of what is under way
                await asyncio.gather(*self.tasks, return_exceptions=True)
            status = engine.status()
            self.report.faults.update(status.faults)
            self.report.shortened = status.device_shortened + status.host_shortened
            self.closing = True
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self.failures:
            raise self.failures[0]
        return self.report


def faulty(seed: int) -> bool:
    """Whether the schedule of this seed has faults: the first thousand do, of the others three of four."""
    return seed < 1000 or seed % 4 != 0


def run_schedule(
    seed: int, *, torch: bool = False, actions: int = 40, faulty: bool = True, verbose: bool = False
) -> Report:
    """Run one schedule; raises if anything that must hold did not."""
    return run_virtual(Schedule(seed, torch=torch, faulty=faulty, verbose=verbose).run(actions))


if __name__ == "__main__":
    replayed = int(sys.argv[1])
    print(run_schedule(replayed, torch="--torch" in sys.argv, faulty=faulty(replayed), verbose=True))  # noqa: T201
