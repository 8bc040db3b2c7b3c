"""Hashes of a history's pages and how they chain into digests.

    behaviours  | page 0 | page 1 | page 2 | tail |
    page hash       h0       h1       h2     ht         content only: no user, no position
    digest at   0        128      256      384   n      d0 = EMPTY,  d(k+1) = H(dk, hk),  digest(n) = H(d3, ht)

A page's hash depends on nothing but its behaviours, so a store can keep it and a window that moves by
whole pages reuses it. A digest depends on everything from the window's start up to its length.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["EMPTY", "PAGE", "bytes_hash", "chain", "page_bytes", "page_hash", "page_hashes"]

PAGE: Final = 128
"""Behaviours to a page of a digest, and tokens to a page of KV."""

EMPTY: Final = bytes(16)
"""The digest of no behaviours."""


def page_bytes(
    items: npt.NDArray[np.int64], actions: npt.NDArray[np.int32], timestamps: npt.NDArray[np.int64]
) -> bytes:
    """What is hashed of a page, whole or not: its columns one behind the other. Arrays are contiguous."""
    return b"".join((items, actions, timestamps))  # type: ignore[arg-type]  # arrays are buffers


def page_hash(items: npt.NDArray[np.int64], actions: npt.NDArray[np.int32], timestamps: npt.NDArray[np.int64]) -> bytes:
    """The hash of the behaviours of one page, whole or not. Arrays are contiguous and of equal length."""
    return bytes_hash(page_bytes(items, actions, timestamps))


def page_hashes(
    items: npt.NDArray[np.int64], actions: npt.NDArray[np.int32], timestamps: npt.NDArray[np.int64]
) -> list[bytes]:
    """The hashes of behaviours that fill whole pages, page by page. The same as of each alone, in fewer steps."""
    if not len(items):
        return []
    columns = [column.view(np.uint8).reshape(len(items) // PAGE, -1) for column in (items, actions, timestamps)]
    return list(map(bytes_hash, np.concatenate(columns, axis=1)))


bytes_hash = xxhash.xxh3_128_digest
"""The hash of a page given as `page_bytes`."""


def chain(digest: bytes, page: bytes) -> bytes:
    """The digest after one more page."""
    return xxhash.xxh3_128_digest(digest + page)
