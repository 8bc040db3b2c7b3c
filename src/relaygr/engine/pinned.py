"""Pages in host memory that a GPU can address: pinned in the background, usable as far as that has come."""

import mmap
import threading
from typing import Final

import torch

from relaygr.engine.step import Progress, no_progress
from relaygr.errors import InvalidInput
from relaygr.kernels import PageLayout

__all__ = ["PinnedPages"]

_CHUNK_BYTES: Final = 64 << 20
"""Small: while the driver pins a chunk it takes no launches."""


class PinnedPages:
    """A pool of `total` pages, of which the first `ready` may be used now."""

    def __init__(self, layout: PageLayout, total: int, device: torch.device, progress: Progress = no_progress) -> None:
        """Pins the first chunk, and the rest in a thread. Raises InvalidInput if not even that can be had."""
        self._device = device
        self._progress = progress
        self.total = total
        self.ready = 0
        self.error: str | None = None
        """Why no more pages are pinned, where that failed."""
        self._page_bytes = layout.bytes
        self.together = max(1, _CHUNK_BYTES // layout.bytes)
        """Pages that are pinned at once: what the driver takes as one piece."""
        self._registered: list[int] = []
        self._stop = threading.Event()
        self.pages = layout.allocate(0)
        self._thread: threading.Thread | None = None
        if not total:
            return
        try:
            memory = torch.frombuffer(mmap.mmap(-1, total * layout.bytes), dtype=torch.uint8)
        except (OSError, ValueError) as error:
            raise InvalidInput("host_cache", f"cannot be allocated: {error}") from error
        self.pages = memory.view(layout.dtype).view(total, *self.pages.shape[1:])
        if not self._pin_next():
            raise InvalidInput("host_cache", f"cannot be pinned: {self.error}")
        self._thread = threading.Thread(target=self._pin_all, name="relaygr-pinning", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give the memory back. Nothing reads or writes it any more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._registered:
            with torch.cuda.device(self._device):
                for pointer in self._registered:
                    torch.cuda.cudart().cudaHostUnregister(pointer)  # type: ignore[no-untyped-call]
        self._registered.clear()
        self.ready = 0
        self.pages = torch.empty(0)

    def _pin_all(self) -> None:
        while self.ready < self.total and not self._stop.is_set() and self._pin_next():
            pass

    def _pin_next(self) -> bool:
        """Pin one more chunk; False where that fails."""
        part = self.pages[self.ready : self.ready + self.together]
        part.view(torch.uint8).zero_()  # the pages of the system are had here, outside the driver
        with torch.cuda.device(self._device):  # the thread's own would be another, which need not have room for us
            status = torch.cuda.cudart().cudaHostRegister(part.data_ptr(), len(part) * self._page_bytes, 1)  # type: ignore[no-untyped-call]
        if int(status):
            self.error = f"the driver says {status} after {self.ready} of {self.total} pages"
            return False
        self._registered.append(part.data_ptr())
        self.ready += len(part)
        self._progress("host pages pinned", self.ready, self.total)
        return True
