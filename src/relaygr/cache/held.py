"""What a tier holds, as columns: all of it is weighed at once when something has to go."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Held", "HeldColumns"]


class HeldColumns(NamedTuple):
    """Of each user: when they were last here, tokens of their prefix and of its head that is missing, whether the other
    tier has it, too, and the last of its pages."""

    last: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.float64]
    head: npt.NDArray[np.float64]
    twice: npt.NDArray[np.bool_]
    page: npt.NDArray[np.int64]

    def at(self, rows: "npt.NDArray[np.int64] | slice") -> "HeldColumns":
        """Of these users."""
        return HeldColumns(self.last[rows], self.tokens[rows], self.head[rows], self.twice[rows], self.page[rows])


class Held:
    """One row for each user, in any order: the last one takes the place of one that goes."""

    def __init__(self) -> None:
        self.users: list[str] = []
        self._row: dict[str, int] = {}
        self._columns = HeldColumns(
            np.empty(64), np.empty(64), np.empty(64), np.empty(64, np.bool_), np.empty(64, np.int64)
        )

    @property
    def columns(self) -> HeldColumns:
        """Views, in the order of `users`."""
        return self._columns.at(slice(len(self.users)))

    def add(self, user: str, *, last: float, tokens: int, head: int, twice: bool, page: int) -> None:
        row = self._row[user] = len(self.users)
        self.users.append(user)
        if row == len(self._columns.last):
            self._columns = self._columns.at(np.arange(2 * row) % row)
        for column, value in zip(self._columns, (last, tokens, head, twice, page), strict=True):
            column[row] = value

    def remove(self, user: str) -> None:
        row, moved = self._row.pop(user), self.users.pop()
        if moved != user:
            self.users[row], self._row[moved] = moved, row
            for column in self._columns:
                column[row] = column[len(self.users)]

    def seen(self, user: str, at: float) -> None:
        """The user was here; whether or not anything is held."""
        row = self._row.get(user)
        if row is not None:
            self._columns.last[row] = at

    def set_head(self, user: str, head: int) -> None:
        """So many tokens of its head are missing by now."""
        self._columns.head[self._row[user]] = head

    def set_twice(self, user: str, twice: bool) -> None:
        """Whether the other tier has it by now; whether or not anything is held."""
        row = self._row.get(user)
        if row is not None:
            self._columns.twice[row] = twice
