"""The layout of KV pages, the same in every tier."""

from dataclasses import dataclass

import torch

from relaygr.history import PAGE

__all__ = ["PageLayout"]


@dataclass(frozen=True)
class PageLayout:
    """What one page of KV is made of: `[layer, k|v, token, head, dim]`, contiguous.

    pages   [page][layer][k|v][token 0…127][head][dim]
             └─ one page: one contiguous block, one copy moves it
                    └─ one layer of it: contiguous too, so a reload can go layer by layer
    """

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32

    @property
    def bytes(self) -> int:
        """Bytes of one page."""
        return self.layers * 2 * PAGE * self.heads * self.head_dim * self.dtype.itemsize

    def allocate(self, pages: int, *, device: torch.device | str = "cpu", pinned: bool = False) -> torch.Tensor:
        """A pool of `pages` pages, its contents undefined."""
        shape = (pages, self.layers, 2, PAGE, self.heads, self.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=device, pin_memory=pinned)

    @staticmethod
    def count(tokens: int) -> int:
        """Pages that `tokens` tokens take."""
        return -(-tokens // PAGE)
