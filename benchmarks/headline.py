"""The relay against the same engine without it: how much longer histories, how many more requests, under the same P99.

    python benchmarks/headline.py --device cuda --commit HASH --out headline --minutes 10
    python benchmarks/headline.py --device cuda --commit HASH --out headline --minutes 10 --only dlrmv3

Costs are measured first, then the simulator, fed with them, says where to begin, then modes are probed in turns.
Simulating needs no GPU: `--part measure` on the machine that has it, `--part guess` on another, then on the first again
without. Other modes than the three that are searched are probed in the last group that is asked for.

Every probe is a line of OUT/headline-probes.jsonl as soon as it is done; called again with the same OUT, or with
`--resume` another's, what is there is not measured again. OUT/headline-<machine>.json has the table.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from common import commit, machine
from headline_plan import Group, Plan, Row, guess, on_cpu, on_gpu, probe_at
from relaygr.engine.simulated import H200, SimulatedExecutor, SimulatedModel
from relaygr.engine.step import Executor, Model
from relaygr.lab.bench import Bench
from relaygr.lab.found import Found
from relaygr.lab.limits import Limits, OutOfTime
from relaygr.lab.probe import Probe
from relaygr.lab.probe_file import ProbeFile
from relaygr.lab.shapes import SHAPES, shaped
from relaygr.serving.modes import COMPARED, Mode

OTHERS = (Mode.TRUNCATE, Mode.RELAY, Mode.RELAY_HOST, Mode.ALWAYS_TRIGGER, Mode.NEVER_TRIGGER)
CHECKED = 12
"""Answers of a row that are compared with full inference, at most."""
console = Console(stderr=True)


def simulated(group: Group) -> SimulatedExecutor:
    """For a rehearsal in real time."""
    layers, dim = SHAPES[group.shape]["layers"], SHAPES[group.shape]["dim"]
    return SimulatedExecutor(H200, page_bytes=layers * dim * 512, depth=2, remember=False, contents=False)


class Headline:
    """One call: what was asked for, the time that is left, and the table so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.out: Path = args.out
        self.name = {"cuda": "h200"}.get(args.device, args.device)
        self.end = time.monotonic() + args.minutes * 60
        self.device: str = args.device
        self.commit = args.commit or commit()
        self.only: list[str] = args.only or []
        self.part: str | None = args.part
        self.probes = ProbeFile(self.out / "headline-probes.jsonl")
        self.path = self.out / f"headline-{self.name}.json"
        self.table: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.table.setdefault("details", {})

    def groups(self) -> list[Group]:
        return on_cpu() if self.device == "cpu" else on_gpu(self.device)

    def chosen(self) -> list[tuple[Group, list[Row]]]:
        """What was asked for: groups, and their rows."""
        groups = self.groups()
        every = [
            (group, [row for row in group.rows if not self.only or {row.name, group.name} & set(self.only)])
            for group in groups
        ]
        known = {name for group in groups for name in (group.name, *(row.name for row in group.rows))}
        if unknown := set(self.only) - known:
            raise SystemExit(
                f"no row or group is called {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}"
            )
        return [(group, rows) for group, rows in every if rows]

    async def run(self) -> None:
        chosen = self.chosen()
        for number, (group, rows) in enumerate(chosen, 1):
            if self.left() < 20:
                break
            if self.part == "guess":
                await self.guess(group, rows, self.known_plan(group), share=1 / (len(chosen) + 1 - number))
                continue
            model: Model = SimulatedModel()
            executor: Executor | None = None
            if self.device == "simulated":
                executor = simulated(group)
            else:
                model = shaped(group.shape)
            console.print(f"[bold]{group.name}[/]: opening, {self.left():.0f} s left")
            async with Bench(model, group.config, executor) as bench:
                plan = await self.plan(group, rows, bench)
                if self.part != "measure":
                    searched = [row for row in rows if await self.search_in_time(group, row, plan, bench)]
                    if number == len(chosen):  # limits come first, those of other groups, too
                        with contextlib.suppress(OutOfTime):
                            for row in searched:
                                await self.others(group, row, plan, bench)

    async def search_in_time(self, group: Group, row: Row, plan: Plan, bench: Bench) -> bool:
        """Search, and say whether there was time for it."""
        try:
            await self.search(group, row, plan, bench)
        except OutOfTime:
            console.print(f"{row.name}: no time left")
            return False
        return True

    def left(self) -> float:
        return float(self.end - time.monotonic())

    def plan_path(self, group: Group) -> Path:
        return self.out / f"headline-plan-{group.name}.json"

    def known_plan(self, group: Group) -> Plan:
        if not self.plan_path(group).exists():
            raise SystemExit(f"{self.plan_path(group)} is not there: measure first")
        return Plan.load(self.plan_path(group))

    async def plan(self, group: Group, rows: Sequence[Row], bench: Bench) -> Plan:
        """What was measured and guessed, now or before. Host memory is there, too."""
        path = self.plan_path(group)
        plan = Plan.load(path) if path.exists() else Plan(path, await bench.measure(), {}, {}, {})
        console.print(f"{group.name}: open, {bench.facts}; {plan.device.costs}; {self.left():.0f} s left")
        for row in rows:
            if row.name in plan.unloaded:
                continue
            n = row.n or plan.device.length_for(row.budgets.ranking_ms / 1e3, group.candidates)
            if row.kind == "rate":
                n = plan.n[row.name] = row.n or await self.half(row, group, plan, bench)
            relay = row.probe(plan.device, Mode.RELAY_HOST_EXTEND, group.candidates, n)
            whole = await bench.unloaded(n, group.candidates, row.budgets.ranking_ms)
            steps = await bench.unloaded(n, group.candidates, relay.tuning.step_ms)
            plan.unloaded[row.name] = n, whole.full, steps.full
            plan.save()
        if self.part == "measure":
            return plan
        await self.guess(group, rows, plan)
        wanted = group.config.host_bytes // plan.device.page_bytes
        while bench.host_pages < wanted and self.left() > 60:  # noqa: ASYNC110  (a thread pins them)
            await asyncio.sleep(0.2)
        return plan

    async def guess(self, group: Group, rows: Sequence[Row], plan: Plan, share: float = 0.2) -> None:
        """Where the simulator sees the limits that are not known yet; by rule of thumb what takes it too long, which is
        that share of the time left."""
        if missing := [row.name for row in rows if row.name not in plan.unloaded]:
            raise SystemExit(f"{plan.path} has nothing of {', '.join(missing)}: measure first")
        asked = {}
        loop = asyncio.get_running_loop()
        highest = self.highest(group)
        with self.workers() as pool:
            for row in rows:
                for mode in COMPARED:
                    rough = {} if self.part == "guess" else plan.rough.get(row.name, {})
                    if mode not in plan.guesses.get(row.name, {}) | rough:
                        n = plan.n.get(row.name, 1024)
                        asked[row.name, mode] = loop.run_in_executor(
                            pool, guess, row, group, plan.measured(row, group.candidates, mode), mode, n, highest
                        )
            if asked:
                await asyncio.wait(asked.values(), timeout=max(30.0, share * self.left()))
            late = {key for key, answer in asked.items() if not answer.done() and answer.cancel()}
        for (name, mode), answer in asked.items():
            if (name, mode) in late:
                row = next(row for row in rows if row.name == name)
                console.print(f"{name} {mode}: the simulator takes too long; beginning where costs say")
                plan.rough.setdefault(name, {})[mode.value] = self.rough(group, row, plan, mode)
                continue
            plan.guesses.setdefault(name, {})[mode.value] = answer.result()
        plan.save()
        console.print(f"{group.name}: {plan.n}, unloaded {plan.unloaded}, guesses {plan.guesses}, {self.left():.0f} s")

    @contextlib.contextmanager
    def workers(self) -> Iterator[ProcessPoolExecutor]:
        """Processes that simulate. None is left when probes begin: they would take the cores that are measured."""
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(max_workers=max((os.cpu_count() or 2) - 2, 2), mp_context=context)
        try:
            yield pool
        finally:
            processes = list((pool._processes or {}).values())
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()
            for process in processes:
                multiprocessing.connection.wait([process.sentinel])  # the pool's own thread joins them

    def rough(self, group: Group, row: Row, plan: Plan, mode: Mode) -> float:
        """A limit by rule of thumb: a seventh of the device in full, two thirds by relay; or what the time allows."""
        device, early = plan.measured(row, group.candidates, mode), mode is Mode.RELAY_HOST_EXTEND
        if row.kind == "rate":
            return (0.65 if early else 0.14) / device.full_s(plan.n[row.name], group.candidates)
        if row.traffic == "warm" and mode.keeps:
            return self.highest(group)
        spent_ms = 0.6 * row.budgets.lead_ms if early else 0.8 * row.budgets.ranking_ms
        return min(float(device.length_for(spent_ms / 1e3, group.candidates)), self.highest(group))

    async def half(self, row: Row, group: Group, plan: Plan, bench: Bench) -> int:
        """Behaviours that take half the ranking budget in full, alone: what the profile says, put right by trying."""
        wanted = row.budgets.ranking_ms / 2
        n, tried = plan.device.length_for(wanted / 1e3, group.candidates), dict[int, float]()
        for _ in range(3):
            n = max(256, min(n, int((group.config.max_history or n) * 0.9)) // 128 * 128)
            tried[n] = (await bench.unloaded(n, group.candidates, row.budgets.ranking_ms)).full
            n = plan.device.length_for(plan.device.full_s(n, group.candidates) * wanted / tried[n], group.candidates)
        return min(tried, key=lambda n: abs(tried[n] - wanted))

    def limits(self, row: Row, bench: Bench) -> Limits:
        def say(line: str) -> None:
            console.print(f"  {row.name} {line}; {self.left():.0f} s left", highlight=False)

        return Limits(bench, self.probes, say, end=self.end)

    async def search(self, group: Group, row: Row, plan: Plan, bench: Bench) -> None:
        """Find the limits of the row's modes."""
        bench.samples.clear()  # of a row there was no time for
        n = plan.n.get(row.name, 0)

        def at(mode: Mode, value: float) -> Probe:
            return probe_at(row, group, plan.measured(row, group.candidates), mode, value, n)

        found = await self.limits(row, bench).search(
            at,
            {mode: 0.92 * plan.begin(row.name, mode) for mode in COMPARED},
            factor=1.12 if row.kind == "rate" else 1.08,
            tries=row.tries,
            confirm=row.confirm,
            highest=self.highest(group) if row.kind == "length" else 1e9,
            sent=lambda probe: int(probe.workload.lengths) if row.kind == "length" else probe.workload.rate,
            row=row.name,
            commit=self.commit,
        )
        self.write(group, row, plan, found, bench)

    async def others(self, group: Group, row: Row, plan: Plan, bench: Bench) -> None:
        """The other modes, at the rate that the whole relay holds."""
        rate = self.table["details"][row.name]["found"][Mode.RELAY_HOST_EXTEND]
        for mode in OTHERS if row.kind == "rate" and rate is not None else ():
            device = plan.measured(row, group.candidates)
            probe = probe_at(row, group, device, mode, rate, plan.n[row.name])
            await self.limits(row, bench).told(probe.tried(1), row=row.name, commit=self.commit, other=True)

    @staticmethod
    def highest(group: Group) -> float:
        """Of lengths: room is left for what users do between their requests."""
        return float((group.config.max_history or 1 << 24) * 0.96)

    def measured_at(self, row: Row) -> str | None:
        """The commit of the last probe of the row's search; those of before commits were kept have none."""
        commits = [told.get("commit") for told in self.probes if told["row"] == row.name and not told.get("other")]
        return commits[-1] if commits else None

    def write(self, group: Group, row: Row, plan: Plan, found: Found, bench: Bench) -> None:
        """The row, and everything that is known, to the table's file."""
        before = self.table["details"].get(row.name, {})
        relay = found.limits[Mode.RELAY_HOST_EXTEND]
        told = found.best.get(Mode.RELAY_HOST_EXTEND, {})
        ratios = {mode.value: found.ratio(mode) for mode in (Mode.FULL, Mode.CACHE)}
        none: dict[str, float | None] = {"full": None, "cache": None}
        n = plan.n.get(row.name) or (int(relay) if relay else None)
        device = plan.measured(row, group.candidates)
        alone = device.full_s(n, group.candidates) * 1e3 if n else None
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
        checked = bench.check(2 if row.kind == "length" else CHECKED) if bench.samples else None
        measured = self.measured_at(row) or before.get("commit", self.commit)
        workload = row.workload(group.candidates)
        self.table["details"][row.name] = {
            "shape": group.shape,
            "commit": measured,
            "row": line,
            "kind": row.kind,
            "traffic": row.traffic,
            "candidates": group.candidates,
            "found": {mode.value: value for mode, value in found.limits.items()},
            "simulated": plan.guesses.get(row.name, {}),
            "tuning": {
                mode.value: asdict(probe_at(row, group, device, mode, limit or 1.0, n or 1).tuning)
                for mode, limit in found.limits.items()
            },
            "stages_ms": [workload.retrieval_ms, workload.pre_processing_ms],
            "stage_spread": workload.stage_spread,
            "best": {mode.value: told for mode, told in found.best.items()},
            "oracle": _checked(before, checked, measured),
            "memory": [group.config.device_cache, group.config.host_cache],
            "costs": asdict(plan.device.costs),
        }
        names = [each.name for every in self.groups() for each in every.rows]
        self.table["details"] = {name: self.table["details"][name] for name in names if name in self.table["details"]}
        shapes: dict[str, list[Any]] = {}
        for detail in self.table["details"].values():
            shapes.setdefault(detail["shape"], []).append(detail["row"])
        whole = {"machine": machine(), "commit": self.commit, "shapes": shapes, "details": self.table["details"]}
        self.path.write_text(json.dumps(whole, indent=1) + "\n")
        console.print(
            f"[bold]{row.name}[/]: {found.limits}, ratios {ratios}, oracle {checked}; {self.left():.0f} s left"
        )


def _checked(before: dict[str, Any], now: dict[str, Any] | None, commit: str | None) -> dict[str, Any] | None:
    """The comparison with full inference to keep in a row: what does not hold, else the larger one, of this commit."""
    earlier = before.get("oracle") if before.get("commit") == commit else None
    told = [each for each in (earlier, now) if each is not None]
    return min(told, key=lambda each: (each["holds"], -each["samples"]), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, at small scale; cuda; or simulated, a rehearsal")
    parser.add_argument("--commit", help="what is measured; not given: asked of git")
    parser.add_argument("--out", type=Path, required=True, help="folder of what is written")
    parser.add_argument("--minutes", type=float, default=30.0, help="no probe begins that would end later")
    parser.add_argument(
        "--resume", type=Path, help="folder of an earlier call: copied into OUT where OUT has none of it"
    )
    parser.add_argument(
        "--only", nargs="*", help="rows or groups by name: half-10, refresh-32k, length-10, dlrmv3, d512…"
    )
    parser.add_argument("--part", choices=("measure", "guess"), help="that alone; not given: all that is missing")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.resume and args.resume != args.out:
        for path in args.resume.glob("headline-*"):
            if not (args.out / path.name).exists():
                shutil.copy(path, args.out)
    if args.device == "cpu":
        import torch

        torch.set_num_threads(1)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Headline(args).run())


if __name__ == "__main__":
    main()
