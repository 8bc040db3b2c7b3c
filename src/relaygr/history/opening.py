"""A store by the name that settings have for it."""

import importlib
from pathlib import Path
from typing import Final

from relaygr.errors import InvalidInput
from relaygr.history.lmdb_store import LmdbStore
from relaygr.history.store import HistoryStore

__all__ = ["REDIS", "open_store", "without_password"]

REDIS: Final = ("redis://", "rediss://", "unix://")
"""How the names of stores in Redis begin; every other is the folder of one in LMDB."""


def open_store(name: str, *, readonly: bool = False) -> HistoryStore:
    """The store: redis://host:6379/0, rediss://, unix:///path, or a folder. Raises what its kind raises.

    `readonly`: nothing is to be written, where the kind can hold to that; a folder that has no store yet gets one.
    """
    if not name.startswith(REDIS):
        if readonly and not (Path(name) / "data.mdb").exists():
            LmdbStore(name).close()
        return LmdbStore(name, readonly=readonly)
    try:
        kind = importlib.import_module("relaygr.history.redis_store").RedisStore
    except ModuleNotFoundError as error:
        if error.name != "redis":
            raise
        raise InvalidInput("store", "is in Redis, whose client is missing: pip install 'relaygr[redis]'") from error
    store: HistoryStore = kind(name)
    return store


def without_password(name: str) -> str:
    """The same store for people and files to read: of one in Redis host and database, without who may use it.

    Where what stands before a host cannot be told from what stands behind it, neither is shown.
    """
    if not name.startswith(REDIS):
        return name
    address, _, options = name.partition("?")
    return f"{name.partition('://')[0]}://…" if "@" in options else address.rpartition("@")[2]
