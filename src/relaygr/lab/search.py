"""The highest value that holds, found with few tries: from a guess, step by step, and confirmed."""

import math
from collections.abc import Awaitable, Callable, Generator, Mapping
from typing import TypeVar

__all__ = ["Search", "bracket", "climb", "half_step", "interleave"]

K = TypeVar("K")

Search = Generator[float, bool, float | None]
"""Yields the next value to try, is sent whether it held, and returns the highest that did; None where none did."""


def climb(guess: float, factor: float = 1.15, *, tries: int = 5, confirm: int = 1, highest: float = 1e9) -> Search:
    """From `guess` up while it holds, or down in growing steps until it does, and then by halves of what is left; at
    last `confirm` more tries of what was found.

    Without a confirmation a value does not count: one that fails it is left for the next lower one. After `tries` the
    last value that held, and was confirmed where tries were left for that, is the answer.
    """
    value, held, failed, left, falls = min(guess, highest), 0.0, math.inf, tries, 0
    confirmed: dict[float, int] = {}
    while left > 0:
        left -= 1
        if (yield value):
            confirmed[value] = confirmed.get(value, -1) + 1
            held = max(held, value)
        else:
            failed = min(failed, value)
            if value <= held:
                held = max((other for other in confirmed if other < failed), default=0.0)
        if held and confirmed[held] >= confirm and (held * factor >= failed * 0.999 or held >= highest):
            break
        far = held * factor**2 * 1.001 < failed < math.inf
        ahead = math.sqrt(held * failed) if far else min(held * factor, highest)
        if not held:
            value = failed / factor ** min(2**falls, 8)
            falls += 1
        elif ahead < failed * 0.999 and ahead > held and left > confirm:
            value = ahead
        elif confirmed[held] < confirm:
            value = held
        else:
            break
    return held or None


def half_step(held: float, failed: float, *, confirm: int = 1) -> Search:
    """From what a climb found halfway up to the lowest that failed, if that holds and is confirmed."""
    value = math.sqrt(held * failed)
    for _ in range(1 + confirm):
        if not (yield value):
            return held
    return value


async def interleave(
    searches: Mapping[K, Search], probe: Callable[[K, float, int], Awaitable[bool]]
) -> dict[K, float | None]:
    """Run several searches side by side, one try of each in turn, so that what disturbs the machine disturbs all.

    `probe` gets whose try it is, the value, and the how manyth it is of that search.
    """
    found: dict[K, float | None] = {}
    waiting = {name: next(search) for name, search in searches.items()}
    turn = 0
    while waiting:
        for name, value in list(waiting.items()):
            held = await probe(name, value, turn)
            try:
                waiting[name] = searches[name].send(held)
            except StopIteration as ended:
                found[name] = ended.value
                del waiting[name]
        turn += 1
    return {name: found[name] for name in searches}


def bracket(holds: Callable[[float], bool], guess: float, *, highest: float = 1e9, tries: int = 8) -> float:
    """About the highest value that holds: up or down from `guess` in large steps, then by halves of what is left.

    The lowest value tried where none holds.
    """
    value = min(guess, highest)
    low, high = 0.0, float("inf")
    for _ in range(tries):
        if holds(value):
            low = value
            if value >= highest:
                return value
        else:
            high = value
        if high <= low * 1.06:
            break
        value = (low * high) ** 0.5 if low and high < float("inf") else min(low * 1.7, highest) if low else high / 1.7
    return low or high
