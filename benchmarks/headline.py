"""The relay against the same engine without it: how much longer histories, how many more requests, under the same P99.

    python benchmarks/headline.py --device cuda --commit HASH --out headline --minutes 10
    python benchmarks/headline.py --device cuda --commit HASH --out headline --minutes 10 --only dlrmv3

Every probe is a line of OUT/headline-probes.jsonl as soon as it is done; called again with the same OUT, or with
`--resume` another's, what is there is not measured again. OUT/headline-<machine>.json has the table. The simulator, fed
with costs measured at the start, says where to begin; modes take turns.
"""

import argparse
import asyncio
import json
import multiprocessing
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from common import commit, machine
from relaygr.config import EngineConfig
from relaygr.engine.simulated import SimulatedCosts, SimulatedExecutor, SimulatedModel
from relaygr.engine.step import Executor, Model
from relaygr.lab.bench import Bench
from relaygr.lab.outcome import Budgets
from relaygr.lab.probe import Device, Probe, ProbeFile
from relaygr.lab.search import bracket, climb, interleave
from relaygr.lab.tuning import Tuning
from relaygr.lab.workload import Workload
from relaygr.model import build_model
from relaygr.serving.modes import Mode

SEARCHED = (Mode.FULL, Mode.CACHE, Mode.RELAY_HOST_EXTEND)
OTHERS = (Mode.TRUNCATE, Mode.RELAY, Mode.RELAY_HOST, Mode.ALWAYS_TRIGGER, Mode.NEVER_TRIGGER)
ITEMS = 100_000
SHAPES: dict[str, dict[str, Any]] = {
    "d512": {"layers": 8, "dim": 512, "heads": 4},
    "dlrmv3": {"layers": 5, "dim": 512, "heads": 4},
    "d64": {"layers": 2, "dim": 64, "heads": 2},
}
STAGES = 0.6, 0.2
"""Retrieval and pre-processing take these shares of what the pipeline leaves to them, in the middle."""
STAGE_SPREAD = 1.25
Kind = Literal["rate", "length"]
Traffic = Literal["cold", "refresh", "warm"]
console = Console(stderr=True)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    kind: Kind
    """What is searched for: the highest rate, or the longest history."""
    budgets: Budgets
    traffic: Traffic
    n: int | None = None
    """Behaviours; None: as many as take half the ranking budget in full, or what is searched for."""

    def workload(self, candidates: int) -> Workload:
        """Without its rate and lengths."""
        left = self.budgets.lead_ms
        base = Workload(
            1.0, 1.0, "reuse", candidates=candidates, longest=1 << 24, past_s=1.0, stage_spread=STAGE_SPREAD,
            retrieval_ms=left * STAGES[0], pre_processing_ms=left * STAGES[1],
        )  # fmt: skip
        if self.traffic == "refresh":
            return replace(base, profile="refresh", past_s=16.0)
        if self.traffic == "warm":
            gap_s = 2.0 if self.kind == "length" else 5.0
            return replace(base, reuse=0.999, gap_s=gap_s, past_s=3 * gap_s)
        return replace(base, arrivals="even" if self.kind == "length" else "poisson")


@dataclass(frozen=True)
class Group:
    """Rows that one engine serves."""

    name: str
    shape: str
    candidates: int
    config: EngineConfig
    rows: Sequence[Row]


def on_gpu(device: str) -> list[Group]:
    config = EngineConfig(
        device=device, dtype="bfloat16", device_cache="96GiB", host_cache="72GiB", max_history=278_528
    )
    half = [Row(f"half-{ms}", "rate", Budgets(ms, 200.0), "cold") for ms in (20, 50, 10)]
    wide = Budgets(50.0, 200.0)
    first = [
        half[0],
        Row("refresh-32k", "rate", wide, "refresh", 32_768),
        Row("length-10", "length", Budgets(10.0, 200.0), "cold"),
        Row("length-50", "length", wide, "cold"),
        Row("length-50-warm", "length", wide, "warm"),
    ]
    dlrmv3 = Row("dlrmv3", "rate", wide, "refresh", 14_335 - 128)
    more = [
        *half[1:],
        Row("warm-128k", "rate", wide, "warm", 131_072),
        Row("refresh-128k", "rate", wide, "refresh", 131_072),
    ]
    return [
        Group("d512", "d512", 512, config, first),
        Group("dlrmv3", "dlrmv3", 2048, replace(config, max_history=16_384), [dlrmv3]),
        Group("d512-more", "d512", 512, config, more),
    ]


def on_cpu() -> list[Group]:
    config = EngineConfig(device_cache="512MiB", host_cache="512MiB", max_history=32_768)
    wide = Budgets(100.0, 400.0)
    rows = [
        Row("half-100", "rate", wide, "cold"),
        Row("refresh-4k", "rate", wide, "refresh", 4096),
        Row("length-100", "length", wide, "cold"),
        Row("length-100-warm", "length", wide, "warm"),
    ]
    return [Group("d64", "d64", 64, config, rows)]


@dataclass
class Plan:
    """What is known before anything is searched: costs, lengths, guesses. Kept, so that what is resumed is the same."""

    path: Path
    device: Device
    n: dict[str, int]
    guesses: dict[str, dict[str, float]]
    """By row and mode: where to begin."""
    unloaded: dict[str, tuple[int, float]]
    """By row: some length, and milliseconds of a rank in full there, by itself."""

    def measured(self, row: "Row", candidates: int) -> Device:
        """The device, with costs put right by what a rank took."""
        n, taken = self.unloaded[row.name]
        return self.device.slower(taken / 1e3 / self.device.full_s(n, candidates))

    def save(self) -> None:
        told = asdict(self)
        del told["path"]
        self.path.write_text(json.dumps(told, indent=1))

    @staticmethod
    def load(path: Path) -> "Plan":
        told = json.loads(path.read_text())
        device = told["device"]
        known = Device(SimulatedCosts(**device["costs"]), device["page_bytes"], EngineConfig(**device["config"]))
        unloaded = {row: (int(n), float(taken)) for row, (n, taken) in told["unloaded"].items()}
        return Plan(path, known, told["n"], told["guesses"], unloaded)


def simulated(group: Group) -> SimulatedExecutor:
    """What an H200 took, about, for a rehearsal in real time."""
    costs = SimulatedCosts(2e-4, 7.3e-8, 2.1e-11, 1.3e-7, 2.5e-11, 2e-5, 42e-6)
    layers, dim = SHAPES[group.shape]["layers"], SHAPES[group.shape]["dim"]
    return SimulatedExecutor(costs, page_bytes=layers * dim * 512, depth=2, remember=False, contents=False)


class OutOfTime(Exception):
    """No time is left for one more probe."""


def even_rate(device: Device, n: int, candidates: int) -> float:
    """Of a search for length: the device is about half busy in full."""
    return float(f"{min(20.0, 0.5 / device.full_s(n, candidates)):.2g}")


def probe_at(row: Row, group: Group, device: Device, mode: Mode, value: float, n: int) -> Probe:
    probe = Probe(mode, row.workload(group.candidates), row.budgets, Tuning.of(row.budgets, mode, device.costs.step))
    if row.kind == "rate":
        return probe.at(rate=float(f"{value:.3g}"), length=n)
    length = max(256, int(value) // 256 * 256)
    rate = 4.0 if row.traffic == "warm" else even_rate(device, length, group.candidates)
    return probe.at(rate=rate, length=length, requests=80)


def guess(row: Row, group: Group, device: Device, mode: Mode, n: int, highest: float) -> float:
    """Where the simulator sees the limit."""
    early = mode is Mode.RELAY_HOST_EXTEND
    if row.kind == "rate":
        begin = (0.7 if early or row.traffic == "refresh" else 0.15) / device.full_s(n, group.candidates)
    else:
        spent = row.budgets.lead_ms * 0.7 if early else row.budgets.ranking_ms * 0.8
        begin = highest if row.traffic == "warm" and mode.keeps else device.length_for(spent / 1e3, group.candidates)

    def holds(value: float) -> bool:
        return bool(device.simulate(probe_at(row, group, device, mode, value, n))["within budgets"])

    return bracket(holds, begin, highest=highest, tries=6)


class Headline:
    def __init__(self, args: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
        self.out: Path = args.out
        self.name = {"cuda": "h200"}.get(args.device, args.device)
        self.end = time.monotonic() + args.minutes * 60
        self.device: str = args.device
        self.commit = args.commit or commit()
        self.only: list[str] = args.only or []
        self.pool = pool
        self.probes = ProbeFile(self.out / "headline-probes.jsonl")
        self.path = self.out / f"headline-{self.name}.json"
        self.table: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.table.setdefault("shapes", {})
        self.table.setdefault("details", {})

    async def run(self) -> None:
        for group in on_cpu() if self.device == "cpu" else on_gpu(self.device):
            rows = [row for row in group.rows if not self.only or row.name in self.only or group.name in self.only]
            if not rows or self.left() < 20:
                continue
            model: Model = SimulatedModel()
            executor: Executor | None = None
            if self.device == "simulated":
                executor = simulated(group)
            else:
                model = build_model("hstu", **SHAPES[group.shape], items=ITEMS, seed=0, scale_length=32_768.0)
            console.print(f"[bold]{group.name}[/]: opening, {self.left():.0f} s left")
            async with Bench(model, group.config, executor) as bench:
                plan = await self.plan(group, rows, bench)
                for row in rows:
                    try:
                        await self.search(group, row, plan, bench)
                    except OutOfTime:
                        console.print(f"{row.name}: no time left")

    def left(self) -> float:
        return float(self.end - time.monotonic())

    async def plan(self, group: Group, rows: Sequence[Row], bench: Bench) -> Plan:
        path = self.out / f"headline-plan-{group.name}.json"
        plan = Plan.load(path) if path.exists() else None
        if plan is None:
            plan = Plan(path, await bench.measure(), {}, {}, {})
        console.print(f"{group.name}: open, {bench.facts}; {plan.device.costs}; {self.left():.0f} s left")
        for row in rows:
            if row.name in plan.unloaded:
                continue
            n = row.n or plan.device.length_for(row.budgets.ranking_ms / 1e3, group.candidates)
            if row.kind == "rate":
                n = plan.n[row.name] = row.n or await self.half(row, group, plan, bench)
            plan.unloaded[row.name] = n, await self.alone(row, group, n, bench)
        asked = {}
        loop = asyncio.get_running_loop()
        highest = float((group.config.max_history or 1 << 24) * 0.96)
        for row in rows:
            for mode in SEARCHED:
                if mode not in plan.guesses.get(row.name, {}):
                    n = plan.n.get(row.name, 1024)
                    asked[row.name, mode] = loop.run_in_executor(
                        self.pool, guess, row, group, plan.measured(row, group.candidates), mode, n, highest
                    )
        for (name, mode), answer in asked.items():
            plan.guesses.setdefault(name, {})[mode.value] = await answer
        plan.save()
        console.print(f"{group.name}: {plan.n}, unloaded {plan.unloaded}, guesses {plan.guesses}, {self.left():.0f} s")
        wanted = group.config.host_bytes // plan.device.page_bytes
        while bench.host_pages < wanted and self.left() > 60:  # noqa: ASYNC110  (a thread pins them)
            await asyncio.sleep(0.2)
        return plan

    async def alone(self, row: Row, group: Group, n: int, bench: Bench) -> float:
        alone = await bench.unloaded(n, group.candidates, row.budgets.ranking_ms)
        return alone.full

    async def half(self, row: Row, group: Group, plan: Plan, bench: Bench) -> int:
        """Behaviours that take half the ranking budget in full, alone: what the profile says, put right by trying."""
        wanted = row.budgets.ranking_ms / 2
        n = plan.device.length_for(wanted / 1e3, group.candidates)
        for _ in range(2):
            n = min(n, int((group.config.max_history or n) * 0.9))
            taken = await self.alone(row, group, n, bench)
            aim = plan.device.full_s(n, group.candidates) * wanted / taken
            n = plan.device.length_for(aim, group.candidates)
        return max(256, n // 128 * 128)

    async def search(self, group: Group, row: Row, plan: Plan, bench: Bench) -> None:
        n = plan.n.get(row.name, 0)
        highest = float((group.config.max_history or 1 << 24) * 0.96) if row.kind == "length" else 1e9
        factor = 1.12 if row.kind == "rate" else 1.08
        quick = row.traffic == "warm" or row.name == "refresh-128k"
        best: dict[Mode, dict[str, Any]] = {}

        async def once(mode: Mode, value: float, turn: int) -> bool:
            probe = probe_at(row, group, plan.measured(row, group.candidates), mode, value, n).seeded(turn + 1)
            told = await self.told(row, probe, bench)
            if told["within budgets"]:
                best[mode] = told | {"value": value}
            return bool(told["within budgets"])

        searches = {
            mode: climb(
                plan.guesses[row.name][mode], factor, tries=2 if quick else 4, confirm=0 if quick else 1,
                highest=highest,
            )
            for mode in SEARCHED
        }  # fmt: skip
        found = await interleave(searches, once)
        self.write(group, row, plan, found, best, bench)
        if row.kind == "rate":
            await self.others(group, row, plan, found, bench)

    def tuning(self, group: Group, row: Row, plan: Plan, mode: Mode) -> Tuning:
        return Tuning.of(row.budgets, mode, plan.measured(row, group.candidates).costs.step)

    async def told(self, row: Row, probe: Probe, bench: Bench, **more: Any) -> dict[str, Any]:
        known = self.probes.find(probe)
        if known is not None:
            return known
        if self.left() < probe.workload.seconds + 12:
            raise OutOfTime
        began = time.monotonic()
        run = await bench.run(probe, sampled=2 if probe.mode is Mode.RELAY_HOST_EXTEND else 0)
        told = run.told(probe.budgets)
        took = time.monotonic() - began
        moments = [[round(value, 3) for value in moment] for moment in run.moments]
        self.probes.add(probe, told, row=row.name, wall_s=took, moments=moments, **more)
        console.print(
            f"  {row.name} {probe.mode}: {probe.workload.rate:g}/s of {probe.workload.lengths}: "
            f"{'holds' if told['within budgets'] else 'fails'}, {told['failed']:.1%} of {told['requests']} failed, "
            f"P99 {told['ranking P99'] or 0:.1f} ms, reuse {told['reuse']:.2f}, busy {told['device busy']:.0%}, "
            f"sender {told['sender late P99']:.1f} ms; {took:.0f} s, {self.left():.0f} s left"
        )
        return told

    async def others(self, group: Group, row: Row, plan: Plan, found: dict[Mode, float | None], bench: Bench) -> None:
        """The other modes at the rate that the relay held, where time is left once the rows are done."""
        rate = found[Mode.RELAY_HOST_EXTEND]
        if rate is None or self.left() < 420:
            return
        for mode in OTHERS:
            probe = probe_at(row, group, plan.measured(row, group.candidates), mode, rate, plan.n[row.name]).seeded(1)
            await self.told(row, probe, bench, other=True)

    def write(
        self, group: Group, row: Row, plan: Plan, found: dict[Mode, float | None], best: dict[Mode, Any], bench: Bench
    ) -> None:
        """The row, and everything that is known, to the table's file."""
        relay = found[Mode.RELAY_HOST_EXTEND]
        told = best.get(Mode.RELAY_HOST_EXTEND, {})
        ratios: dict[str, float | None] = {}
        for mode in (Mode.FULL, Mode.CACHE):
            other = found[mode]
            ratios[mode.value] = relay / other if relay and other else None
        none: dict[str, float | None] = {"full": None, "cache": None}
        n = plan.n.get(row.name) or (int(relay) // 256 * 256 if relay else None)
        alone = plan.measured(row, group.candidates).full_s(n, group.candidates) * 1e3 if n else None
        line = {
            "budgets_ms": [row.budgets.ranking_ms, row.budgets.pipeline_ms],
            "n": n,
            "reuse": told.get("reuse"),
            "full_share": alone / row.budgets.ranking_ms if alone else None,
            "length_ratio": ratios if row.kind == "length" else none,
            "throughput_ratio": ratios if row.kind == "rate" else none,
            "p99_ms": told.get("ranking P99"),
            "paths": told.get("paths", {}),
        }
        checked = bench.check() if bench.samples else None
        workload = row.workload(group.candidates)
        self.table["details"][row.name] = {
            "shape": group.shape,
            "row": line,
            "kind": row.kind,
            "traffic": row.traffic,
            "candidates": group.candidates,
            "found": {mode.value: value for mode, value in found.items()},
            "simulated": plan.guesses[row.name],
            "tuning": {mode.value: asdict(self.tuning(group, row, plan, mode)) for mode in SEARCHED},
            "stages_ms": [workload.retrieval_ms, workload.pre_processing_ms],
            "stage_spread": workload.stage_spread,
            "best": {mode.value: told for mode, told in best.items()},
            "oracle": checked or self.table["details"].get(row.name, {}).get("oracle"),
            "memory": [group.config.device_cache, group.config.host_cache],
            "costs": asdict(plan.device.costs),
        }
        shapes: dict[str, list[Any]] = {}
        for detail in self.table["details"].values():
            shapes.setdefault(detail["shape"], []).append(detail["row"])
        whole = {"machine": machine(), "commit": self.commit, "shapes": shapes, "details": self.table["details"]}
        self.path.write_text(json.dumps(whole, indent=1) + "\n")
        console.print(f"[bold]{row.name}[/]: {found}, ratios {ratios}, oracle {checked}; {self.left():.0f} s left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, at small scale; cuda; or simulated, a rehearsal")
    parser.add_argument("--commit", help="what is measured; not given: asked of git")
    parser.add_argument("--out", type=Path, required=True, help="folder of what is written")
    parser.add_argument("--minutes", type=float, default=30.0, help="no probe begins that would end later")
    parser.add_argument("--resume", type=Path, help="folder of an earlier call: its probes are not run again")
    parser.add_argument("--only", nargs="*", help="rows or groups by name")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.resume and args.resume != args.out:
        for path in args.resume.glob("headline-*"):
            shutil.copy(path, args.out)
    if args.device == "cpu":
        import torch

        torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=14 if args.device != "cpu" else 2, mp_context=context) as pool:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(Headline(args, pool).run())


if __name__ == "__main__":
    main()
