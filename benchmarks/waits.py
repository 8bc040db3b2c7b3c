"""What a step of 16 resident ranks takes of the loop's CPU, by how long the device takes for it, by the candidates, and
by what is read meanwhile.

The device does nothing but take its time: steps are laid out as for a GPU whose launches are captured, nothing is
launched, and the loop asks after them as it asks a GPU. While it waits, whoever shares the processor may push it out of
the caches. So that this does not hang on who that is, some ways do so themselves: each time that the step has not ended
they read the next 64 KiB, of 64 KiB in all, which stay in the nearest caches, or of more than any cache holds. Ways are
interleaved, medians over rounds.
"""

import asyncio
import itertools
import statistics
import time
from collections import defaultdict, deque
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from uvloop import run as run_on_uvloop

from closed_loop import closed_loop
from common import history_of, write_result
from engine import NoDevice
from phases import Phases
from relaygr import Engine, EngineConfig, build_model
from relaygr.engine.buckets import Bucket
from relaygr.engine.mailbox import Mailbox
from relaygr.engine.staging import Staged, Staging
from relaygr.engine.step import Model, Served, Step, StepResult
from relaygr.engine.trays import Trays
from relaygr.history import PAGE
from relaygr.lab.shapes import ITEMS
from relaygr.serving.garbage import settled

N, USERS, CALLERS = 8192, 96, 16
WAITS_MS = (0.5, 2.5, 6.0, 10.0)
CANDIDATES = (512, 2048)
CHUNK = 64 << 10
READ = {"nothing": 0, "64 KiB": CHUNK, "128 MiB": 128 << 20}
"""What is read while a step is waited for, by name: bytes."""
STEP_MS = 100.0
"""All callers go into one step, whatever it was predicted to take."""
ROUNDS, SECONDS = 7, 0.5
PHASES = ("turn", "plan", "launch", "deliver", "learn", "complete", "all")


class TimedDevice(NoDevice):
    """Steps take so many seconds each, one after the other."""

    depth = 2

    def __init__(self) -> None:
        self.seconds = WAITS_MS[0] / 1e3
        self.read = np.empty((0, CHUNK // 8))
        """What is read while a step is waited for, line by line."""
        self._line = 0
        self.steps = self.lines_read = 0
        self._staging = Staging(2 * N // PAGE)
        self._boxes: dict[Bucket, Mailbox] = {}
        self._flights: deque[tuple[float, Staged, asyncio.Future[StepResult]]] = deque()
        self._free_at = 0.0

    async def prepare(self, model: Model) -> Served:
        return replace(await super().prepare(model), trays=Trays(model.config, 2 * N // PAGE))

    def launch(self, step: Step) -> "asyncio.Future[StepResult]":
        loop = asyncio.get_running_loop()
        staged, future = Staged(step, self._staging), loop.create_future()
        if staged.scores:
            (group,), out = staged.scores, staged.take_out(1)
            assert group.bucket is not None
            if (box := self._boxes.get(group.bucket)) is None:
                box = self._boxes[group.bucket] = Mailbox(torch.device("cpu"), group.bucket.users)
            box.post_scores(group.trays, group.counts, out.address(0)).over()
        staged.launched()
        self._free_at = max(self._free_at, time.perf_counter()) + self.seconds
        if not self._flights:
            loop.call_soon(self._poll)
        self._flights.append((self._free_at, staged, future))
        self.steps += 1
        return future

    def _poll(self) -> None:
        ends, staged, future = self._flights[0]
        if time.perf_counter() >= ends:
            self._flights.popleft()
            future.set_result(self.deliver(staged))
        elif len(self.read):
            self._line = (self._line + 1) % len(self.read)
            self.read[self._line].sum()
            self.lines_read += 1
        if self._flights:
            asyncio.get_running_loop().call_soon(self._poll)

    def deliver(self, staged: Staged) -> StepResult:
        result = StepResult(staged.results(), self.seconds)
        staged.release()
        return result


async def measure() -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    model = build_model("hstu", layers=1, dim=16, heads=1, items=ITEMS, seed=0, scale_length=float(N))
    config = EngineConfig(device_cache="16MiB", host_cache="0", max_history=2 * N, pre_infer_share=1.0, step_ms=STEP_MS)
    device = TimedDevice()
    found: defaultdict[tuple[float, int, str], list[dict[str, Any]]] = defaultdict(list)
    memory = {name: np.ones((size // CHUNK, CHUNK // 8)) for name, size in READ.items()}
    ways = list(itertools.product(WAITS_MS, CANDIDATES, READ))
    async with Engine(model, config, executor=device) as engine:
        phases = Phases(engine)
        device.deliver = phases.timed("deliver", device.deliver)  # type: ignore[method-assign]
        histories = [history_of(draw, N, ITEMS) for _ in range(USERS)]
        for user, history in enumerate(histories):
            await engine.pre_infer(f"u{user}", history)
        with settled():
            for way in track(ways * ROUNDS, "loads"):
                wait_ms, candidates, read = way
                device.seconds, device.read = wait_ms / 1e3, memory[read]
                device.steps = device.lines_read = 0
                load = await closed_loop(
                    engine, phases, histories, "resident", {"resident": 1.0}, CALLERS, candidates, SECONDS
                )
                found[way].append(load | {"read_mib": device.lines_read * CHUNK / device.steps / 2**20})
    rows = []
    for (wait_ms, candidates, read), loads in found.items():
        steps = [load["loop_cpu_us_per_step"] for load in loads]
        row: dict[str, Any] = {"wait_ms": wait_ms, "candidates": candidates, "read": read}
        for name in ("ranks_per_step", "read_mib"):
            row[name] = statistics.median(load[name] for load in loads)
        row |= {"least_us": min(step["all"] for step in steps)}
        row |= {f"{phase}_us": statistics.median(step[phase] for step in steps) for phase in PHASES}
        rows.append(row)
    return rows


def main() -> None:
    torch.set_num_threads(1)
    rows = run_on_uvloop(measure())
    table = Table(title=f"a step of {CALLERS} ranks on {N:,} behaviours, µs of the loop's CPU")
    for heading in rows[0]:
        table.add_column(heading.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:,.1f}" if isinstance(value, float) else str(value) for value in row.values()))
    console = Console(width=180)
    console.print(table)
    inputs = {"n": N, "users": USERS, "callers": CALLERS, "rounds": ROUNDS, "seconds": SECONDS, "read": READ}
    inputs |= {"step_ms": STEP_MS}
    console.print(f"written to {write_result('waits-cpu', inputs, {'rows': rows})}")


if __name__ == "__main__":
    main()
