"""The contract of a stack of layers, whatever its family."""

from typing import Protocol

import torch

from relaygr.kernels import Attention, PageLayout, Ragged

__all__ = ["Stack"]


class Stack(Protocol):
    """Layers over packed rows [t, dim], with the KV of their users in pages."""

    attention: Attention

    def layout(self) -> PageLayout:
        """The pages this stack reads and writes."""
        ...

    def append(self, x: torch.Tensor, pages: torch.Tensor, batch: Ragged) -> None:
        """Run new tokens, writing their KV into their pages. The last layer's output is skipped: nothing reads it."""
        ...

    def score(self, x: torch.Tensor, pages: torch.Tensor, batch: Ragged) -> torch.Tensor:
        """Run candidates against pages, writing nothing."""
        ...
