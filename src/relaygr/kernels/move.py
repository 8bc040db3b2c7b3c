"""Pages moved between memories that the device can address: its own, and pinned memory of the host."""

import torch

from relaygr.kernels.device import has_triton

__all__ = ["move_pages", "move_pages_plain"]


def move_pages(
    source: torch.Tensor, target: torch.Tensor, old: torch.Tensor, new: torch.Tensor, first: int, last: int
) -> None:
    """Copy layers first … last - 1 of pages old[i] of one pool to new[i] of another, in one launch.

    Both pools are [page, layer, …], contiguous, and one of them is on the device that `old` and `new`, int32, are on.
    """
    if not has_triton() or old.device.type != "cuda":
        move_pages_plain(source, target, old, new, first, last)
        return
    from relaygr.kernels import move_triton

    move_triton.move_pages(source, target, old, new, first, last)


def move_pages_plain(
    source: torch.Tensor, target: torch.Tensor, old: torch.Tensor, new: torch.Tensor, first: int, last: int
) -> None:
    """`move_pages`, as it is defined."""
    for come, go in zip(old.tolist(), new.tolist(), strict=True):
        target[go, first:last].copy_(source[come, first:last], non_blocking=True)
