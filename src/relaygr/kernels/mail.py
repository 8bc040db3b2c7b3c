"""How a captured launch is told where this replay's inputs lie and where its scores go: its own addresses are fixed.

The host posts a letter for each replay; the replay fetches its inputs, computes, and delivers. So one call launches
all of it, and nothing of it waits for another.

    letters [LETTERS, WORDS], pinned:   inputs | scores | began | ended        addresses, and nanoseconds of the device
    state [3], on the device:       programs that have fetched | programs that have delivered | scores

A replay's letter is found from the counts: every program of a kernel adds one when it is done, so the count divided by
the programs of a launch is the number of launches before this one, whoever of them is done already. Only those that
fetch read a letter, and leave on the device what the others need of it: a thousand reads of the host's memory are slow.
"""

from typing import Final, NamedTuple

import torch

__all__ = ["BEGAN", "ENDED", "INPUTS", "LETTERS", "SCORES", "WORDS", "Mail", "fetch"]

LETTERS: Final = 64
"""Replays of one captured launch that may be under way."""
WORDS: Final = 4
"""Of a letter."""
INPUTS, SCORES, BEGAN, ENDED = range(WORDS)


class Mail(NamedTuple):
    """Of one captured launch."""

    letters: torch.Tensor
    """int64 [LETTERS, WORDS], pinned."""
    state: torch.Tensor
    """int64 [3], on the device, zeros at first."""

    @staticmethod
    def make(device: torch.device | str) -> "Mail":
        pinned = torch.device(device).type == "cuda"
        letters = torch.zeros((LETTERS, WORDS), dtype=torch.int64, pin_memory=pinned)
        return Mail(letters, torch.zeros(3, dtype=torch.int64, device=device))


def fetch(mail: Mail, words: torch.Tensor) -> None:
    """Fill `words`, int32, from where the next letter says."""
    from relaygr.kernels import mail_triton

    mail_triton.fetch(mail, words)
