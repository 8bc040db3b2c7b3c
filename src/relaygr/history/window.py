"""Windows over long histories."""

from dataclasses import dataclass

from relaygr.errors import InvalidInput
from relaygr.history.digest import PAGE
from relaygr.history.history import History, index

__all__ = ["SteppedWindow"]


@dataclass(frozen=True)
class SteppedWindow:
    """Caps a history, moving the window's start only in whole steps.

    A window that moved with every behaviour would change every prefix with every behaviour. This one keeps
    between `cap - step + 1` and `cap` of the newest behaviours, and its start stays for `step` behaviours.
    """

    cap: int
    """The most behaviours a window holds."""
    step: int
    """How far the start moves at a time: a multiple of the page, at most the cap."""

    def __post_init__(self) -> None:
        index("step", self.step)
        index("cap", self.cap)
        if self.step < PAGE or self.step % PAGE:
            raise InvalidInput("step", f"must be a positive multiple of the page, {PAGE}")
        if self.cap < self.step:
            raise InvalidInput("cap", f"must be at least the step, {self.step}")

    def start(self, length: int) -> int:
        """Where the window of a history of `length` behaviours begins."""
        return max(0, -(-(length - self.cap) // self.step) * self.step)

    def apply(self, history: History) -> History:
        """The window, sharing the history's arrays and the hashes of its pages.

        `history` may itself be a window: starts are counted from the user's first behaviour, so that a
        store's last n and the whole history give the same window.
        """
        start = self.start(history.start + len(history))
        if start <= history.start:
            return history
        return history[start - history.start :]
