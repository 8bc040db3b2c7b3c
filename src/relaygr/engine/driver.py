"""What torch does not offer of the CUDA driver, or not as fast: streams that nobody else is given, what is launched on
one of them, and many copies in one call.

torch hands out streams of a small pool in turn, so two that were asked for apart may be one: what is copied on it would
become part of what is captured on it.
"""

import contextlib
import ctypes
import functools
from types import TracebackType
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Addresses", "OnStream", "Sizes", "can_copy_many", "copy_many", "free_stream", "own_stream"]

Addresses = npt.NDArray[np.uint64]
Sizes = npt.NDArray[np.uint64]

_NON_BLOCKING: Final = 1
_STREAM_ORDER: Final = 1
"""Sources are read in the order of the stream: what is copied may be written by what was launched before."""


_FREE: Final[dict[tuple[int | None, bool], list[torch.cuda.Stream]]] = {}
"""Streams that were given back, by device and whether they are urgent."""


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: in which order sources are read, and where either side lies, which the driver finds out."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def own_stream(device: torch.device, *, urgent: bool = False) -> torch.cuda.Stream:
    """A stream of one's own on a device that is in use, until it is given back with `free_stream`."""
    with contextlib.suppress(IndexError):  # another thread may take the last one
        return _FREE.setdefault((device.index, urgent), []).pop()
    made = ctypes.c_void_p()
    with torch.cuda.device(device):
        _check(_driver().cuStreamCreateWithPriority(ctypes.byref(made), _NON_BLOCKING, -1 if urgent else 0))
    assert made.value is not None
    return torch.cuda.ExternalStream(made.value, device=device)  # type: ignore[no-untyped-call]


def free_stream(stream: torch.cuda.Stream, *, urgent: bool = False) -> None:
    """Nothing is launched on it any more. It is kept for the next who asks: torch may still remember its name."""
    _FREE[stream.device.index, urgent].append(stream)


class OnStream:
    """`with torch.cuda.stream(stream)` for a stream that is used for every step: a tenth of the time."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream.stream_id, stream.device_index, stream.device_type
        self._before: list[tuple[int, tuple[int, int, int]]] = []

    def __enter__(self) -> None:
        index = self._stream[1]
        self._before.append((torch._C._cuda_getDevice(), torch._C._cuda_getCurrentStream(index)))
        torch._C._cuda_setStream(*self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        device, stream = self._before.pop()
        torch._C._cuda_setStream(*stream)
        if device != stream[1]:
            torch._C._cuda_setDevice(device)


def can_copy_many() -> bool:
    """Whether the driver is as new as that: from CUDA 12.8 on."""
    return hasattr(_driver(), "cuMemcpyBatchAsync")


def copy_many(sources: Addresses, targets: Addresses, sizes: Sizes, stream: torch.cuda.Stream) -> None:
    """Copy so many bytes from each source to its target by the copy engines, on the stream."""
    first, failed = np.zeros(1, np.uint64), ctypes.c_size_t()
    attributes = _Attributes(order=_STREAM_ORDER)
    _check(
        _driver().cuMemcpyBatchAsync(
            _pointer(targets),
            _pointer(sources),
            _pointer(sizes),
            ctypes.c_size_t(len(sources)),
            ctypes.byref(attributes),
            _pointer(first),
            ctypes.c_size_t(1),
            ctypes.byref(failed),
            ctypes.c_void_p(stream.cuda_stream),
        )
    )


def _pointer(array: Addresses) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver answers {status}")
