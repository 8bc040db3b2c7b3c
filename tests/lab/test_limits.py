"""What a search over probes tells: limits, and the probes they were seen in."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relaygr.config import EngineConfig
from relaygr.engine.simulated import SimulatedCosts, SimulatedExecutor, SimulatedModel
from relaygr.lab.bench import Bench
from relaygr.lab.limits import Limits, OutOfTime
from relaygr.lab.outcome import Budgets
from relaygr.lab.probe import Probe
from relaygr.lab.probe_file import ProbeFile
from relaygr.lab.tuning import Tuning
from relaygr.lab.workload import Workload
from relaygr.serving.modes import Mode

MODES = (Mode.FULL, Mode.RELAY_HOST_EXTEND)


class Scripted(Limits):
    """Probes that are answered from a list, each mode's in turn; no time is left when it ends."""

    def __init__(self, path: Path, answers: dict[Mode, str]) -> None:
        super().__init__(None, ProbeFile(path))  # type: ignore[arg-type]
        self.asked: list[tuple[Mode, float, int]] = []
        self._answers = {mode: iter(each) for mode, each in answers.items()}

    async def told(self, probe: Probe, *, sampled: int = 0, **more: Any) -> dict[str, Any]:
        answer = next(self._answers[probe.mode], None)
        if answer is None:
            raise OutOfTime("no time is left")
        self.asked.append((probe.mode, probe.workload.rate, probe.workload.seed))
        return {
            "within budgets": answer == "y",
            "rate": probe.workload.rate,
            "failed, 95%": [0.0099 if answer in "ls" else 0.0101, 0.2],  # l: it may be luck
            "ranking P99, 95%": [50.1 if answer == "s" else 50.0, None],  # s: that, too, but it is too slow
        }


def at(mode: Mode, rate: float) -> Probe:
    budgets = Budgets()
    return Probe(mode, Workload(rate, 5.0, "refresh", seed=2), budgets, Tuning.of(budgets, mode))


@pytest.mark.parametrize(
    ("answers", "limit"),
    [
        ("ynyyy", 100 * 1.1),  # up fails; confirmed; half a step up holds twice
        ("ynyyn", 100.0),  # holds there once only
        ("ynyn", 100.0),
        ("yny", 100.0),  # no time for that
    ],
)
def test_what_is_told_of_a_limit_was_seen_at_that_limit(tmp_path: Path, answers: str, limit: float) -> None:
    limits = Scripted(tmp_path / "probes", dict.fromkeys(MODES, answers))
    found = asyncio.run(limits.search(at, dict.fromkeys(MODES, 100.0), factor=1.21, tries=5))
    assert found.limits == {mode: pytest.approx(limit) for mode in MODES}
    assert {mode: told["rate"] for mode, told in found.best.items()} == found.limits
    seeds = [seed for mode, _, seed in limits.asked if mode is Mode.FULL]
    assert seeds == [2001, 2002, 2003, 2101, 2102][: len(answers)]


def test_a_half_step_that_was_done_counts_where_there_was_no_time_for_another_modes(tmp_path: Path) -> None:
    limits = Scripted(tmp_path / "probes", {Mode.FULL: "ynyyy", Mode.RELAY_HOST_EXTEND: "ynyy"})
    found = asyncio.run(limits.search(at, dict.fromkeys(MODES, 100.0), factor=1.21, tries=5))
    assert found.limits == {Mode.FULL: pytest.approx(110.0), Mode.RELAY_HOST_EXTEND: 100.0}
    assert {mode: told["rate"] for mode, told in found.best.items()} == found.limits


@pytest.mark.parametrize(
    ("answers", "limit", "rates", "seeds"),
    [
        ("ylyny", 121.0, [100, 121, 121, 146.41, 121], [2001, 2002, 2202, 2003, 2004]),  # held when tried again
        ("ylny", 100.0, [100, 121, 121, 100], [2001, 2002, 2202, 2003]),  # failed again
        ("yllyyy", 110.0, [100, 121, 121, 100, 110, 110], [2001, 2002, 2202, 2003, 2101, 2102]),  # once more only
        ("ylnylyy", 110.0, [100, 121, 121, 100, 110, 110, 110], [2001, 2002, 2202, 2003, 2101, 2301, 2102]),
    ],
)
def test_what_fails_by_no_more_than_luck_is_tried_once_more(
    tmp_path: Path, answers: str, limit: float, rates: list[float], seeds: list[int]
) -> None:
    limits = Scripted(tmp_path / "probes", {Mode.FULL: answers})
    found = asyncio.run(limits.search(at, {Mode.FULL: 100.0}, factor=1.21, tries=5))
    assert found.limits == {Mode.FULL: pytest.approx(limit)}
    assert [rate for _, rate, _ in limits.asked] == pytest.approx(rates)
    assert [seed for _, _, seed in limits.asked] == seeds


def test_what_is_too_slow_is_not_tried_again_for_failing_seldom(tmp_path: Path) -> None:
    limits = Scripted(tmp_path / "probes", {Mode.FULL: "ysy"})
    limits_found = asyncio.run(limits.search(at, {Mode.FULL: 100.0}, factor=1.21, tries=3)).limits
    assert limits_found == {Mode.FULL: 100.0}
    assert [rate for _, rate, _ in limits.asked] == pytest.approx([100, 121, 100])


@pytest.mark.parametrize(
    ("answers", "tries", "limit", "confirmed", "failed"),
    [
        ("yny", 3, 100.0, True, 121.0),
        ("y", 1, 100.0, False, None),
        ("ny", 2, 100 / 1.21, False, 100.0),  # the last try held: none is left to confirm it
        ("ynn", 3, None, False, 100.0),  # it failed when it was to be confirmed
        ("nn", 2, None, False, 100 / 1.21),
        ("yynny", 5, 100.0, True, 121.0),  # the next value down was not tried again yet
        ("yynn", 4, 100.0, False, 121.0),
    ],
)
def test_what_was_not_confirmed_is_told_apart_and_what_failed_next_is_told(
    tmp_path: Path, answers: str, tries: int, limit: float | None, confirmed: bool, failed: float | None
) -> None:
    limits = Scripted(tmp_path / "probes", {Mode.FULL: answers + "n" * 4})
    found = asyncio.run(limits.search(at, {Mode.FULL: 100.0}, factor=1.21, tries=tries)).modes[Mode.FULL]
    assert found.value == (None if limit is None else pytest.approx(limit))
    assert found.confirmed == confirmed
    half = pytest.approx(1.1 * (limit or 0.0))  # where that was tried at last
    assert found.failed in ((None,) if failed is None else (half, pytest.approx(failed)))


def test_a_line_tells_a_dash_where_nothing_was_answered(tmp_path: Path) -> None:
    said: list[str] = []
    sent = at(Mode.FULL, 20.0)
    sent = replace(sent, workload=replace(sent.workload, seconds=0.5, past_s=0.0, lengths="64"))

    async def main() -> None:
        slow = SimulatedExecutor(SimulatedCosts(0.06, 0.0, 0.0, 0.0, 0.0), page_bytes=2**12)
        config = EngineConfig(device_cache="1MiB", host_cache="0", max_history=1024)
        async with Bench(SimulatedModel(), config, slow) as bench:
            await Limits(bench, ProbeFile(tmp_path / "probes"), said.append).told(sent)

    asyncio.run(main())
    assert len(said) == 1
    assert said[0].startswith("full: 20/s of 64 behaviours fails: 100.0% of ")
    assert "failed, ranking P99 –, reuse" in said[0]


def test_limits_are_told_as_they_were_sent_and_none_is_above_what_failed(tmp_path: Path) -> None:
    limits = Scripted(tmp_path / "probes", {Mode.FULL: "ynyyy"})
    found = asyncio.run(
        limits.search(at, {Mode.FULL: 100.0}, factor=1.21, tries=5, highest=110.0, sent=lambda probe: 1e3)
    )
    assert found.limits == {Mode.FULL: 1e3}
    assert max(rate for _, rate, _ in limits.asked[3:]) < 110.0
