"""The host's side of the mail of one captured launch."""

from typing import NamedTuple

import torch

from relaygr.kernels.mail import BEGAN, ENDED, INPUTS, LETTERS, SCORES, Mail

__all__ = ["Mailbox", "Posted"]


class Mailbox:
    """Letters in the order of replays: one is posted before each."""

    def __init__(self, device: torch.device) -> None:
        self.mail = Mail.make(device)
        self._letters = self.mail.letters.numpy()
        self._posted = 0
        self._under_way = 0
        self._beginning = 0
        """How often it has begun anew."""

    @property
    def full(self) -> bool:
        """Whether all letters may still be unread."""
        return self._under_way == LETTERS

    def post(self, inputs: int, scores: int = 0) -> "Posted":
        """Write the letter of the next replay: addresses in pinned memory. `Posted.over` must follow its end."""
        number = self._posted % LETTERS
        self._letters[number, INPUTS] = inputs
        self._letters[number, SCORES] = scores
        self._posted += 1
        self._under_way += 1
        return Posted(self, number, self._beginning)

    def forget(self) -> None:
        """Some replay may not have been launched. All that were have ended: begin anew."""
        self.mail.state.zero_()
        self._posted = self._under_way = 0
        self._beginning += 1


class Posted(NamedTuple):
    """One letter."""

    box: Mailbox
    number: int
    beginning: int

    @property
    def began(self) -> int:
        """Nanoseconds on the device's clock, once the replay has ended."""
        return int(self.box._letters[self.number, BEGAN])

    @property
    def ended(self) -> int:
        return int(self.box._letters[self.number, ENDED])

    def over(self) -> None:
        """Its replay has ended, and its times were read."""
        if self.beginning == self.box._beginning:
            self.box._under_way -= 1
