"""Behaviours, their digests, windows over them, and the stores that keep them."""

from relaygr.history.digest import PAGE, chain, page_hash
from relaygr.history.history import History
from relaygr.history.known import KnownHistory
from relaygr.history.lmdb_store import LmdbStore
from relaygr.history.opening import open_store
from relaygr.history.store import HistoryStore, StoreCorrupt, StoreError, StoreFull
from relaygr.history.window import SteppedWindow

__all__ = [
    "PAGE",
    "History",
    "HistoryStore",
    "KnownHistory",
    "LmdbStore",
    "SteppedWindow",
    "StoreCorrupt",
    "StoreError",
    "StoreFull",
    "chain",
    "open_store",
    "page_hash",
]
