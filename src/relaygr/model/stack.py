"""The contract of a stack of layers, whatever its family."""

from collections.abc import Callable
from typing import Protocol

import torch

from relaygr.kernels import Attention, PageLayout, Ragged

__all__ = ["BeforeLayer", "Stack"]

BeforeLayer = Callable[[int], None]
"""Called with a layer's number before anything of that layer is launched."""


class Stack(Protocol):
    """Layers over packed rows [t, dim], with the KV of their users in pages."""

    attention: Attention

    def layout(self) -> PageLayout:
        """The pages this stack reads and writes."""
        ...

    def append(self, x: torch.Tensor, pages: torch.Tensor, batch: Ragged) -> None:
        """Run new tokens, writing their KV into their pages. The last layer's output is skipped: nothing reads it."""
        ...

    def score(
        self, x: torch.Tensor, pages: torch.Tensor, batch: Ragged, before: BeforeLayer | None = None
    ) -> torch.Tensor:
        """Run candidates against pages, writing nothing."""
        ...
