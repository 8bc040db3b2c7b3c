"""Pages moved between the device and pinned host memory: by the copy engines, beside whatever the device computes."""

import numpy as np
import torch

from relaygr.cache import Pages
from relaygr.engine.driver import Addresses, can_copy_many, copy_many
from relaygr.engine.step import Direction, PageCopy
from relaygr.kernels.move import move_pages

__all__ = ["PageMover", "layer_cuts", "runs"]


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


def runs(device: Pages, host: Pages, pinned: int) -> tuple[Pages, Pages, Pages]:
    """Copies of whole pages put together where pages lie side by side in both tiers, up or down: of each run the lowest
    page on either side, and how many they are. No run goes from one piece of `pinned` host pages to the next. There
    must be a page, and none twice.

    The driver takes a microsecond for each copy. Pages are taken and freed in the order of prefixes: where these are
    all as long a prefix is a few runs; where they are not, runs become shorter with every prefix.
    """
    steps, host_steps, pieces = device[1:] - device[:-1], host[1:] - host[:-1], host // pinned  # `np.diff` takes longer
    apart = (np.abs(steps) != 1) | (steps != host_steps) | (pieces[1:] != pieces[:-1])
    edges = np.concatenate(((0,), np.flatnonzero(apart) + 1, (len(device),)))
    begins, ends = edges[:-1], edges[1:] - 1
    return np.minimum(device[begins], device[ends]), np.minimum(host[begins], host[ends]), ends - begins + 1


class PageMover:
    """The pools of both tiers, [page, layer, …], as addresses.

    Where the driver cannot copy many pieces in one call a kernel does; it takes multiprocessors from those who compute.
    """

    def __init__(self, pages: torch.Tensor, host_pages: torch.Tensor, pinned: int) -> None:
        """`pinned`: host pages that were pinned together. The driver takes no copy of more than such a piece."""
        self.layers = pages.shape[1]
        self._pages = pages
        self._host_pages = host_pages
        self._pinned = pinned
        self._layer_bytes = pages[0, 0].numel() * pages.element_size()
        self._batched = can_copy_many()

    def move(self, copy: PageCopy, first: int, last: int, stream: torch.cuda.Stream) -> None:
        """Copy layers first … last - 1 of its pages, on that stream of the current device."""
        if not len(copy.source):
            return  # which the driver would refuse
        inward = copy.direction is Direction.IN
        if self._batched:
            host, device = (copy.source, copy.target) if inward else (copy.target, copy.source)
            if last - first == self.layers:
                device, host, counts = runs(device, host, self._pinned)
            else:
                counts = np.ones(len(host), np.int64)
            ours, theirs = self._addresses(self._pages, device, first), self._addresses(self._host_pages, host, first)
            sizes = (counts * ((last - first) * self._layer_bytes)).astype(np.uint64)
            copy_many(*((theirs, ours) if inward else (ours, theirs)), sizes, stream)
        else:
            source, target = (self._host_pages, self._pages) if inward else (self._pages, self._host_pages)
            with torch.cuda.stream(stream):
                both = torch.tensor(np.stack((copy.source, copy.target)), dtype=torch.int32).pin_memory()
                old_pages, new_pages = both.to(stream.device, non_blocking=True)
                move_pages(source, target, old_pages, new_pages, first, last)

    def _addresses(self, pool: torch.Tensor, pages: Pages, layer: int) -> Addresses:
        offsets = (pages * self.layers + layer) * self._layer_bytes
        return offsets.astype(np.uint64) + np.uint64(pool.data_ptr())
