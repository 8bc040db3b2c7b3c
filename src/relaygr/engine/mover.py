"""Pages moved between the device and pinned host memory: by the copy engines, beside whatever the device computes."""

import numpy as np
import torch

from relaygr.cache import Pages
from relaygr.engine.driver import Addresses, can_copy_many, copy_many
from relaygr.engine.step import Direction, PageCopy
from relaygr.kernels.move import move_pages

__all__ = ["PageMover", "layer_cuts"]


def layer_cuts(layers: int) -> list[tuple[int, int]]:
    """Layers in parts, each half of those left, the last one a single layer.

    A score that runs behind a load ends when it would if every layer came by itself: a layer is scored in far less time
    than it is copied, so only the last one is waited for.
    """
    cuts, first = [], 0
    while first < layers:
        last = first + max((layers - first) // 2, 1)
        cuts.append((first, last))
        first = last
    return cuts


class PageMover:
    """The pools of both tiers, [page, layer, …], as addresses.

    Where the driver cannot copy many pieces in one call a kernel does; it takes multiprocessors from those who compute.
    """

    def __init__(self, pages: torch.Tensor, host_pages: torch.Tensor) -> None:
        self.layers = pages.shape[1]
        self._pools = {Direction.IN: (host_pages, pages), Direction.OUT: (pages, host_pages)}
        self._layer_bytes = pages[0, 0].numel() * pages.element_size()
        self._batched = can_copy_many()

    def move(self, copy: PageCopy, first: int, last: int, stream: torch.cuda.Stream) -> None:
        """Copy layers first … last - 1 of its pages, on that stream of the current device."""
        source, target = self._pools[copy.direction]
        if not len(copy.source):
            return  # which the driver would refuse
        if self._batched:
            size = (last - first) * self._layer_bytes
            old, new = self._addresses(source, copy.source, first), self._addresses(target, copy.target, first)
            copy_many(old, new, size, stream)
        else:
            with torch.cuda.stream(stream):
                both = torch.tensor(np.stack((copy.source, copy.target)), dtype=torch.int32).pin_memory()
                old_pages, new_pages = both.to(stream.device, non_blocking=True)
                move_pages(source, target, old_pages, new_pages, first, last)

    def _addresses(self, pool: torch.Tensor, pages: Pages, layer: int) -> Addresses:
        offsets = (pages * self.layers + layer) * self._layer_bytes
        return offsets.astype(np.uint64) + np.uint64(pool.data_ptr())
