"""Rows of many users packed into one batch, and where each user's KV lies."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from relaygr.history import PAGE

__all__ = ["PageList", "Ragged"]

PageList = Sequence[int] | npt.NDArray[np.integer]
"""One user's pages, in order."""


@dataclass(frozen=True)
class Ragged:
    """Which rows of a packed batch belong to which user, and the pages that hold that user's tokens.

    For user u, rows starts[u] … starts[u+1]-1 are its new tokens (append) or its candidates (score);
    cached[u] tokens are already in its pages, which table[u] lists in order. In an append the table reaches
    over the new tokens too. Entries of the table past a user's pages are never read.

    `rows` and `lengths` are `starts` (as counts) and `cached` on the host, or bounds of them: the shapes a launch is
    planned from. Rows behind starts[users] belong to nobody: what comes out of them is undefined and goes into no page.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    starts: torch.Tensor
    """int32 [users + 1], on the device."""
    cached: torch.Tensor
    """int32 [users], on the device."""
    table: torch.Tensor
    """int32 [users, pages], on the device."""
    bounded: bool = False
    """Whether `rows` and `lengths` are bounds, so that there may be fewer rows than those."""

    @staticmethod
    def build(
        rows: Sequence[int], cached: Sequence[int], pages: Sequence[PageList], device: torch.device | str = "cpu"
    ) -> "Ragged":
        """Pack host lists. `pages[u]` are user u's pages in order."""
        width = max((len(row) for row in pages), default=0)
        table = np.zeros((len(rows), max(width, 1)), np.int32)
        for user, row in enumerate(pages):
            table[user, : len(row)] = row
        starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(rows, out=starts[1:])
        return Ragged(
            tuple(rows),
            tuple(cached),
            torch.from_numpy(starts).to(device),
            torch.from_numpy(np.asarray(cached, np.int32)).to(device),
            torch.from_numpy(table).to(device),
        )

    @staticmethod
    def bound(users: int, rows: int, pages: int, device: torch.device | str = "cpu") -> "Ragged":
        """A batch to capture launches with: up to `users` users of up to `rows` rows and `pages` pages each.

        It holds nobody. What a replay is to run is copied into `starts`, `cached` and `table` beforehand, within the
        bounds; users that are not there have no rows, so `starts` ends by repeating its last value. In an append the
        pages bound cached and new tokens together.
        """
        return Ragged(
            (rows,) * users,
            (pages * PAGE,) * users,
            torch.zeros(users + 1, dtype=torch.int32, device=device),
            torch.zeros(users, dtype=torch.int32, device=device),
            torch.zeros((users, max(pages, 1)), dtype=torch.int32, device=device),
            bounded=True,
        )

    @property
    def limit(self) -> torch.Tensor | None:
        """int32 [1], on the device: how many rows there are, where the host knows a bound of them only."""
        return self.starts[-1:] if self.bounded else None

    @property
    def total(self) -> int:
        """Rows in the batch."""
        return sum(self.rows)

    def row_users(self) -> torch.Tensor:
        """int64 [total]: the user each row belongs to, the last where it belongs to nobody.

        Computed on the device, shapes known from the host.
        """
        rows = torch.arange(self.total, device=self.starts.device, dtype=self.starts.dtype)
        return torch.searchsorted(self.starts[:-1], rows, right=True) - 1

    def token_positions(self) -> torch.Tensor:
        """int64 [total]: the position of each row among its user's tokens, when rows are new tokens."""
        users = self.row_users()
        rows = torch.arange(self.total, device=self.starts.device)
        return rows - self.starts[users] + self.cached[users]

    def candidate_positions(self) -> torch.Tensor:
        """int64 [total]: the position behind the user's last token, when rows are candidates."""
        return self.cached[self.row_users()].long()
