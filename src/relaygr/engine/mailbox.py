"""The host's side of the mail of one captured launch."""

import itertools
import struct
from collections.abc import Sequence

import torch

from relaygr.kernels.mail import BEGAN, ENDED, INPUTS, LETTERS, WORDS, Mail

__all__ = ["Mailbox", "Posted"]


class Mailbox:
    """Letters in the order of replays: one is posted before each."""

    def __init__(self, device: torch.device, users: int = 0) -> None:
        """For scores of up to so many users; 0 for appends."""
        self.mail = Mail.make(device, users)
        self._users = users
        self._stride = self.mail.letters.stride(0)
        self._scores = struct.Struct(f"={WORDS + users}q{users + 1}i")
        """A letter that names trays."""
        self._words = self.mail.letters.numpy().reshape(-1).data
        """Of all letters, one behind the other: several times as fast to read and write as an array."""
        self._bytes = self._words.cast("B")
        self._posted = 0
        self._under_way: list[Posted | None] = [None] * LETTERS
        """Whose each letter is, until its replay is known to have ended."""

    @property
    def full(self) -> bool:
        """Whether the next letter may still be unread."""
        return self._under_way[self._posted % LETTERS] is not None

    def post(self, inputs: int) -> "Posted":
        """Write the letter of the next append: an address in pinned memory. The box must not be full.

        `Posted.over` must follow its end.
        """
        number = self._posted % LETTERS
        self._words[number * self._stride + INPUTS] = inputs
        return self._sent(number)

    def post_scores(self, trays: Sequence[int], rows: Sequence[int], scores: int) -> "Posted":
        """The same of scores: addresses of trays in pinned memory, how many rows each has, and where theirs go."""
        number, nobody = self._posted % LETTERS, (0,) * (self._users - len(trays))
        starts = list(itertools.accumulate(rows, initial=0))
        words = 0, scores, 0, 0, *trays, *nobody, *starts, *starts[-1:] * len(nobody)
        self._scores.pack_into(self._bytes, 8 * number * self._stride, *words)
        return self._sent(number)

    def _sent(self, number: int) -> "Posted":
        self._posted += 1
        self._under_way[number] = posted = Posted(self, number)
        return posted

    def times(self, number: int) -> tuple[int, int]:
        """When the replay of this letter began and ended, as the device noted it."""
        begin = number * self._stride
        return self._words[begin + BEGAN], self._words[begin + ENDED]

    def settle(self) -> None:
        """All replays have ended: note their times, so that their letters can be used again."""
        for posted in self._under_way:
            if posted is not None:
                posted.noted = posted.times
        self._under_way = [None] * LETTERS

    def forget(self) -> None:
        """Some replay may not have been launched. All that were have ended: begin anew."""
        self.settle()
        self.mail.state.zero_()
        self._posted = 0


class Posted:
    """One letter."""

    __slots__ = ("_box", "noted", "number")

    def __init__(self, box: Mailbox, number: int) -> None:
        self.number = number
        self.noted: tuple[int, int] | None = None
        """When it began and ended, where the letter may be another's by now."""
        self._box = box

    @property
    def times(self) -> tuple[int, int]:
        """Nanoseconds on the device's clock: when its replay began and ended, once it has."""
        return self._box.times(self.number) if self.noted is None else self.noted

    def over(self) -> None:
        """Its replay has ended, and its times were read."""
        if self._box._under_way[self.number] is self:
            self._box._under_way[self.number] = None
