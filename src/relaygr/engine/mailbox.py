"""The host's side of the mail of one captured launch."""

import torch

from relaygr.kernels.mail import BEGAN, ENDED, INPUTS, LETTERS, SCORES, WORDS, Mail

__all__ = ["Mailbox", "Posted"]


class Mailbox:
    """Letters in the order of replays: one is posted before each."""

    def __init__(self, device: torch.device) -> None:
        self.mail = Mail.make(device)
        self._words = self.mail.letters.numpy().reshape(-1).data
        """Of all letters, one behind the other: several times as fast to read and write as an array."""
        self._posted = 0
        self._under_way: list[Posted | None] = [None] * LETTERS
        """Whose each letter is, until its replay is known to have ended."""

    @property
    def full(self) -> bool:
        """Whether the next letter may still be unread."""
        return self._under_way[self._posted % LETTERS] is not None

    def post(self, inputs: int, scores: int = 0) -> "Posted":
        """Write the letter of the next replay: addresses in pinned memory. The box must not be full.

        `Posted.over` must follow its end.
        """
        number = self._posted % LETTERS
        begin = number * WORDS
        self._words[begin + INPUTS] = inputs
        self._words[begin + SCORES] = scores
        self._posted += 1
        self._under_way[number] = posted = Posted(self, number)
        return posted

    def settle(self) -> None:
        """All replays have ended: note their times, so that their letters can be used again."""
        for posted in self._under_way:
            if posted is not None:
                posted.noted = posted.began, posted.ended
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
    def began(self) -> int:
        """Nanoseconds on the device's clock, once the replay has ended."""
        return self.noted[0] if self.noted is not None else self._box._words[self.number * WORDS + BEGAN]

    @property
    def ended(self) -> int:
        return self.noted[1] if self.noted is not None else self._box._words[self.number * WORDS + ENDED]

    def over(self) -> None:
        """Its replay has ended, and its times were read."""
        if self._box._under_way[self.number] is self:
            self._box._under_way[self.number] = None
