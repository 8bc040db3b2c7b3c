"""The contract of a stack of layers, whatever its family."""

from typing import Protocol

import torch

from relaygr.kernels import Attention, PageLayout, Ragged

__all__ = ["Stack", "forward_with_candidates"]


class Stack(Protocol):
    """Layers over packed rows [t, dim], with the KV of their users in pages."""

    attention: Attention

    def layout(self) -> PageLayout:
        """The pages this stack reads and writes."""
        ...

    def append(self, x: torch.Tensor, pages: torch.Tensor, batch: Ragged) -> None:
        """Run new tokens, writing their KV into their pages. The last layer's output is skipped: nothing reads it."""
        ...

    def append_with_output(self, x: torch.Tensor, pages: torch.Tensor, batch: Ragged) -> torch.Tensor:
        """The same, and the last layer's output for every new token."""
        ...

    def score(self, x: torch.Tensor, pages: torch.Tensor, batch: Ragged) -> torch.Tensor:
        """Run candidates against pages, writing nothing."""
        ...


def forward_with_candidates(stack: Stack, x: torch.Tensor, num_candidates: int) -> torch.Tensor:
    """One user's [n + m, dim] under the candidate mask: causal history, each candidate sees history and itself."""
    n = len(x) - num_candidates
    layout = stack.layout()
    pages = layout.allocate(max(layout.count(n), 1), device=x.device)
    table = [list(range(len(pages)))]
    parts = []
    if n:
        parts.append(stack.append_with_output(x[:n], pages, Ragged.build([n], [0], table, x.device)))
    if num_candidates:
        parts.append(stack.score(x[n:], pages, Ragged.build([num_candidates], [n], table, x.device)))
    return torch.cat(parts) if parts else x
