"""How a captured launch is told where this replay's inputs lie and where its scores go: its own addresses are fixed.

The host posts a letter for each replay; the replay fetches its inputs, computes, and delivers. So one call launches
all of it, and nothing of it waits for another.

    letters [LETTERS, …], pinned:   inputs | scores | began | ended            addresses, and nanoseconds of the device
        of scores, behind that:     trays [users] | starts [users + 1]         addresses, and int32
    state [3], on the device:       programs that have fetched | programs that have delivered | scores

An append's inputs lie together, laid out for it. A score's lie on trays, one for each user, since the rank came: its
letter names those whom this replay is for, and where the rows of each begin.

    tray, pinned, int32:            cached | position | where dense begins | – | table | items | dense

A replay's letter is found from the counts: every program of a kernel adds one when it is done, so the count divided by
the programs of a launch is the number of launches before this one, whoever of them is done already. Only those that
fetch read a letter, and leave on the device what the others need of it: a thousand reads of the host's memory are slow.
"""

from typing import Final, NamedTuple

import torch

__all__ = [
    "BEGAN",
    "CACHED",
    "DENSE",
    "ENDED",
    "HEAD",
    "INPUTS",
    "LETTERS",
    "POSITION",
    "SCORES",
    "WORDS",
    "Inputs",
    "Mail",
    "collect",
    "fetch",
]

LETTERS: Final = 64
"""Replays of one captured launch that may be under way."""
WORDS: Final = 4
"""Of a letter, but for trays and starts."""
INPUTS, SCORES, BEGAN, ENDED = range(WORDS)
HEAD: Final = 4
"""Words of a tray before its table. Each of its parts begins at a multiple of 16 bytes."""
CACHED, POSITION, DENSE = range(HEAD - 1)


class Mail(NamedTuple):
    """Of one captured launch."""

    letters: torch.Tensor
    """int64 [LETTERS, WORDS and more], pinned."""
    state: torch.Tensor
    """int64 [3], on the device, zeros at first."""

    @staticmethod
    def make(device: torch.device | str, users: int = 0) -> "Mail":
        """For scores of so many users; 0 for appends."""
        pinned = torch.device(device).type == "cuda"
        words = WORDS + (users + (users + 2) // 2 if users else 0)
        letters = torch.zeros((LETTERS, words), dtype=torch.int64, pin_memory=pinned)
        return Mail(letters, torch.zeros(3, dtype=torch.int64, device=device))


class Inputs(NamedTuple):
    """Where a captured score has its inputs; `Packed` says what they are."""

    starts: torch.Tensor
    cached: torch.Tensor
    positions: torch.Tensor
    table: torch.Tensor
    items: torch.Tensor
    dense: torch.Tensor | None


def fetch(mail: Mail, words: torch.Tensor) -> None:
    """Fill `words`, int32, from where the next letter says."""
    from relaygr.kernels import mail_triton

    mail_triton.fetch(mail, words)


def collect(mail: Mail, inputs: Inputs) -> None:
    """Fill them from the trays that the next letter names. Users behind those have no rows; what was in rows and pages
    behind a user's stays."""
    from relaygr.kernels import mail_triton

    mail_triton.collect(mail, inputs)
