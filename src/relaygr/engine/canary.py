"""Checksums of pages: taken when tokens are written, compared before they are read. Slow; for finding faults."""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from relaygr.engine.step import Direction, PageCopy, PageSpoiled, Step
from relaygr.history import PAGE

__all__ = ["Canary"]

_UNKNOWN: Final = -1
"""In place of a count of tokens: what the page holds was not summed, and is not checked."""
_AT_ONCE: Final = 16
"""Pages that are summed together: enough to be quick, few enough to fit beside the rest."""


class Canary:
    """One checksum for each page of both tiers, over the tokens that have been written to it.

    Steps and copies are told of in the order they run. The sums are kept and compared on the device, in that order too,
    so a caller on a GPU makes its calls on the stream of the steps.
    """

    def __init__(self, pages: torch.Tensor, host_pages: int) -> None:
        self._pages = pages.flatten(4).view(torch.int16)
        self._sums = {
            Direction.IN: torch.zeros(len(pages), dtype=torch.int64, device=pages.device),
            Direction.OUT: torch.zeros(host_pages, dtype=torch.int64, device=pages.device),
        }
        """By the direction that leads to a tier: of device pages, and of host pages."""
        self._filled = {Direction.IN: np.zeros(len(pages), np.int64), Direction.OUT: np.zeros(host_pages, np.int64)}
        """Tokens that each sum is over."""
        width = self._pages.shape[-1]
        odd = torch.arange(width * 2 * self._pages.shape[1], device=pages.device) * 2 + 1
        self._weights = (odd * 0x9E3779B1).view(1, self._pages.shape[1], 2, 1, width)
        self._tokens = torch.arange(PAGE, device=pages.device)

    def check(self, step: Step) -> torch.Tensor:
        """Whether a page that the step reads is spoiled, as a tensor on the device. Call it before the step."""
        read = {old for old, _ in step.page_copies}
        copied = {new for _, new in step.page_copies}
        written: set[int] = set()
        rows = []
        for row in step.appends:
            rows.append((row.pages, row.low, copied | written))
            written |= set(np.asarray(row.pages)[row.low // PAGE : -(-row.high // PAGE)].tolist())
        rows += [(score.pages, score.tokens, copied | written) for score in step.scores]
        for pages, tokens, made_by_the_step in rows:
            for place, page in enumerate(np.asarray(pages)[: -(-tokens // PAGE)].tolist()):
                if page in made_by_the_step or self._filled[Direction.IN][page] == _UNKNOWN:
                    continue
                if self._filled[Direction.IN][page] < min(PAGE, tokens - place * PAGE):
                    raise PageSpoiled(f"page {page} is read before it was written")
                read.add(page)
        index = np.array(sorted(page for page in read if self._filled[Direction.IN][page] != _UNKNOWN), np.int64)
        return (self._sum(index) != self._sums[Direction.IN][self._on_device(index)]).any()

    def wrote(self, step: Step) -> None:
        """The step has run: what it wrote is summed."""
        filled, sums = self._filled[Direction.IN], self._sums[Direction.IN]
        for old, new in step.page_copies:
            filled[new] = filled[old]
            sums[new] = sums[old]
        touched = set()
        for row in step.appends:
            for place in range(row.low // PAGE, -(-row.high // PAGE)):
                page = int(np.asarray(row.pages)[place])
                filled[page] = min(PAGE, row.high - place * PAGE)
                touched.add(page)
        index = np.array(sorted(touched), np.int64)
        sums[self._on_device(index)] = self._sum(index)

    def moved(self, copy: PageCopy) -> None:
        """The copy takes the sums of its pages along."""
        other = Direction.OUT if copy.direction is Direction.IN else Direction.IN
        old, new = (np.asarray(pages, np.int64) for pages in (copy.source, copy.target))
        self._filled[copy.direction][new] = self._filled[other][old]
        if copy.direction is Direction.OUT:
            self._filled[Direction.OUT][new[-1:]] = _UNKNOWN  # someone may append to its last page while it is copied
        self._sums[copy.direction][self._on_device(new)] = self._sums[other][self._on_device(old)]

    def _sum(self, index: npt.NDArray[np.int64]) -> torch.Tensor:
        """Of these device pages: every value counts, by its place."""
        sums = []
        for begin in range(0, len(index), _AT_ONCE):
            part = index[begin : begin + _AT_ONCE]
            of_tokens = (self._pages[self._on_device(part)].long() * self._weights).sum((1, 2, 4))
            inside = self._tokens < self._on_device(self._filled[Direction.IN][part])[:, None]
            sums.append((of_tokens * (self._tokens * 2 + 1) * inside).sum(1))
        return torch.cat(sums) if sums else self._sums[Direction.IN][:0]

    def _on_device(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self._tokens.device)
