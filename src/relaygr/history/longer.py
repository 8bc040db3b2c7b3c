"""Longer histories from real ones: a user's own behaviour, resampled. What is added is made up.

A history is cut into sessions, where more than half an hour passed. New sessions are drawn from the user's own and put
before the first real one, each a gap before the next that is drawn from the user's own gaps between sessions. Inside a
session the behaviours keep their order and gaps; a tenth of its items are replaced by others that the user met, so that
no session is a plain copy. The real history stays at the end, as it was.

    real                                  ▒▒▒ ▒▒ ▒▒▒▒▒
    lengthened    ░░ ░░░ ░░░░░ ░░░ ░░ ░░░ ▒▒▒ ▒▒ ▒▒▒▒▒
"""

from typing import Final

import numpy as np

from relaygr.history.history import History

__all__ = ["lengthened"]

_SESSION_S: Final = 1800
_OTHER: Final = 0.1
_FIRST_GAP_S: Final = 86_400
"""Between sessions of a user who has had one only."""


def lengthened(history: History, length: int, random: np.random.Generator) -> History:
    """The history with behaviours made of its own before it, `length` in all; one that is empty or has as many stays
    as it is. Nothing made up is before 1970."""
    count = length - len(history)
    if count <= 0 or not len(history):
        return history
    gaps = np.diff(history.timestamps, prepend=history.timestamps[0])
    breaks = np.flatnonzero(gaps > _SESSION_S)
    starts, stops = np.concatenate(([0], breaks)), np.concatenate((breaks, [len(history)]))
    between = gaps[breaks] if len(breaks) else np.array([_FIRST_GAP_S])
    sizes = stops - starts
    chosen: list[int] = []
    total = 0
    while total < count:
        more = random.integers(0, len(starts), max(1, (count - total) // max(1, int(sizes.mean()))))
        chosen += more.tolist()
        total += int(sizes[more].sum())
    sessions = [np.arange(starts[session], stops[session]) for session in chosen]
    rows = np.concatenate(sessions)
    inside = gaps[rows]
    firsts = np.cumsum([len(session) for session in sessions])[:-1]
    inside[firsts] = random.choice(between, len(firsts))
    rows, inside = rows[-count:], inside[-count:]
    last = int(history.timestamps[0]) - int(random.choice(between))
    times = np.maximum(last - np.concatenate((np.cumsum(inside[:0:-1])[::-1], [0])), 0)
    items = history.items[rows]
    other = random.random(count) < _OTHER
    items[other] = random.choice(history.items, int(other.sum()))
    return History(
        np.concatenate((items, history.items)),
        np.concatenate((history.actions[rows], history.actions)),
        np.concatenate((times, history.timestamps)),
    )
