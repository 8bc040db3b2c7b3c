"""The highest rate, and the longest history, at which a mode keeps to its budgets: searched on a real engine."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from relaygr.errors import RelayError
from relaygr.lab.bench import Bench
from relaygr.lab.device import Device
from relaygr.lab.found import Found, Limit, shown_lengths
from relaygr.lab.outcome import SUCCESS, Budgets
from relaygr.lab.probe import Probe
from relaygr.lab.probe_file import ProbeFile
from relaygr.lab.search import bracket, climb, half_step, interleave
from relaygr.serving.modes import Mode

__all__ = ["Limits", "OutOfTime", "guess_length", "guess_rate"]

At = Callable[[Mode, float], Probe]
"""The probe of a mode at a value: a rate, or a length."""

_SETTLING_S: Final = 18.0
"""About what a probe takes beside its requests."""
_HALF_STEPS: Final = 100
"""Tries before them, for their arrivals: more than any search has."""
_AGAIN: Final = 200
"""And before what is tried again."""


class OutOfTime(RelayError):
    """No time is left for one more probe."""


class Limits:
    """Runs probes that were not run before, and keeps what they tell."""

    def __init__(
        self,
        bench: Bench,
        probes: ProbeFile,
        say: Callable[[str], None] = lambda line: None,
        *,
        end: float = float("inf"),
    ) -> None:
        """`say` hears a line for each probe. After `end`, on time.monotonic(), none begins: OutOfTime."""
        self._bench = bench
        self._probes = probes
        self._say = say
        self._end = end

    async def told(self, probe: Probe, *, sampled: int = 0, **more: Any) -> dict[str, Any]:
        """What came of this probe, now or before. `more` is kept with it."""
        known = self._probes.find(probe)
        if known is not None:
            return known
        if time.monotonic() + probe.workload.seconds + _SETTLING_S > self._end:
            raise OutOfTime("no time is left for one more probe")
        began = time.monotonic()
        run = await self._bench.run(probe, sampled=sampled, hopeless=True)
        told = run.told(probe.budgets)
        moments = [[round(value, 3) for value in moment] for moment in run.moments]
        self._probes.add(probe, told, wall_s=time.monotonic() - began, moments=moments, **more)
        self._say(_line(probe, told))
        return told

    async def search(
        self,
        at: At,
        guesses: Mapping[Mode, float],
        *,
        factor: float = 1.12,
        tries: int = 5,
        confirm: int = 1,
        highest: float = 1e9,
        sent: Callable[[Probe], float] = lambda probe: probe.workload.rate,
        **more: Any,
    ) -> Found:
        """Search all of these modes side by side, each from its guess. Tries of one number have the same arrivals.

        A try that fails by no more than luck may do is tried once more, with others. Without that, one bad moment on
        the way up would end a search, and the sooner the more gradually a mode begins to fail.
        What was found, and seen to fail a step above, is tried half a step up at last, where there is time. What held
        counts where no try was left to confirm it, and is told as not confirmed. Limits are told as they were `sent`,
        which rounds.
        """
        held: dict[tuple[Mode, float], list[dict[str, Any]]] = {}
        failed: dict[Mode, list[float]] = {mode: [] for mode in guesses}

        async def once(mode: Mode, value: float, turn: int) -> bool:
            sampled = 2 if mode is Mode.RELAY_HOST_EXTEND else 0
            probe = at(mode, value)
            told = await self.told(probe.tried(turn + 1), sampled=sampled, **more)
            if not told["within budgets"] and _may_be_luck(told, probe.budgets):
                told = await self.told(probe.tried(_AGAIN + turn + 1), sampled=sampled, **more)
            if told["within budgets"]:
                held.setdefault((mode, value), []).append(told)
            else:
                failed[mode].append(value)
            return bool(told["within budgets"])

        searches = {
            mode: climb(guess, factor, tries=tries, confirm=confirm, highest=highest) for mode, guess in guesses.items()
        }
        limits = await interleave(searches, once)
        halves = {
            mode: half_step(value, min(failed[mode]), confirm=confirm)
            for mode, value in limits.items()
            if value is not None and min(failed[mode], default=math.inf) < value * factor * 1.001
        }

        async def half(mode: Mode, value: float, turn: int) -> bool:
            with contextlib.suppress(OutOfTime):
                return await once(mode, value, _HALF_STEPS + turn)
            return False  # as it was found; those of other modes that were done count

        limits |= await interleave(halves, half)

        def limit(mode: Mode, value: float | None) -> Limit:
            rounded = None if value is None else sent(at(mode, value))
            above = (other for other in (sent(at(mode, each)) for each in failed[mode]) if other > (rounded or 0.0))
            times = 0 if value is None else len(held[mode, value])
            return Limit(rounded, confirmed=times > confirm, failed=min(above, default=None))

        return Found(
            {mode: limit(mode, value) for mode, value in limits.items()},
            {mode: held[mode, value][-1] for mode, value in limits.items() if value is not None},
        )


def guess_rate(device: Device, at: At, mode: Mode, length: float, candidates: int, *, returning: bool) -> float:
    """Where the simulator sees the highest rate."""
    kept = mode.keeps and returning
    share = 0.7 if kept or mode is Mode.RELAY_HOST_EXTEND else 0.15
    begin = share / device.full_s(int(length), candidates)
    return bracket(lambda rate: bool(device.simulate(at(mode, rate))["within budgets"]), begin, tries=10)


def guess_length(device: Device, at: At, mode: Mode, candidates: int, highest: float, *, returning: bool) -> float:
    """Where the simulator sees the longest history."""
    budgets = at(mode, 1024).budgets
    spent_ms = budgets.lead_ms * 0.7 if mode is Mode.RELAY_HOST_EXTEND else budgets.ranking_ms * 0.8
    begin = highest if mode.keeps and returning else device.length_for(spent_ms / 1e3, candidates)
    holds = lambda length: bool(device.simulate(at(mode, length))["within budgets"])  # noqa: E731
    return bracket(holds, begin, highest=highest, tries=6)


def _may_be_luck(told: Mapping[str, Any], budgets: Budgets) -> bool:
    """Whether a probe that failed may be of traffic that holds: the 95% intervals of its figures reach there."""
    slowest = told["ranking P99, 95%"]
    return bool(told["failed, 95%"][0] < 1 - SUCCESS and (slowest is None or slowest[0] <= budgets.ranking_ms))


def _line(probe: Probe, told: Mapping[str, Any]) -> str:
    held = "holds" if told["within budgets"] else "fails"
    late, slowest = told["sender late P99"], told["ranking P99"]
    return (
        f"{probe.mode}: {probe.workload.rate:g}/s of {shown_lengths(probe.workload.lengths)} {held}: "
        f"{told['failed']:.1%} of {told['requests']} failed, ranking P99 "
        f"{'–' if slowest is None else f'{slowest:.1f} ms'}, reuse {told['reuse']:.2f}, "
        f"device {told['device busy']:.0%} busy" + ("" if late is None else f", sender {late:.1f} ms late")
    )
