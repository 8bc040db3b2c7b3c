"""Histories in a Redis server: shared by gateways and instances of many machines."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from relaygr.errors import InvalidInput, Overloaded, RelayError, Unavailable
from relaygr.history.opening import without_password
from relaygr.history.record_store import RecordStore
from relaygr.history.records import LAYOUT, Records
from relaygr.history.redis_records import Changed, Fields, RedisRecords, RedisWrite
from relaygr.history.store import StoreError, StoreFull

__all__ = ["RedisStore"]

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

TRIES: Final = 1000
"""How often work is begun again because others wrote the same users; each time one of them got on."""
QUIET_S: Final = 0.5
"""After a failure the server is left alone that long: callers are told at once instead of waiting in turn."""

# Every user must still be as it was read, or nothing is written. A full server refuses a script at its first write,
# unless that deletes: what is not there is not deleted.
_COMMIT: Final = """
for i, key in ipairs(KEYS) do
  if (redis.call('HGET', key, 'r') or '') ~= ARGV[i] then return 0 end
end
local at = #KEYS + 1
for _, key in ipairs(KEYS) do
  if ARGV[at] == '1' and redis.call('EXISTS', key) == 1 then redis.call('DEL', key) end
  local fields = tonumber(ARGV[at + 1])
  at = at + 2
  for field = at, at + 2 * fields - 2, 2 do redis.call('HSET', key, ARGV[field], ARGV[field + 1]) end
  at = at + 2 * fields
end
return 1
"""


class RedisStore(RecordStore):
    """A HistoryStore in the database that `url` names: redis://host:6379/0, rediss:// for TLS, unix:///path.

    One server holds all users (a primary with replicas, no cluster: `append_many` spans users). A read takes
    two round trips however long the history is, an append three; nothing is locked, and who finds that another
    wrote the same user meanwhile begins again. What survives a crash of the server is for its persistence to say.

    A server that is gone or does not answer within `timeout_s` is Unavailable; then, for a moment, without being
    asked again. One that is not there yet when the store is opened is asked when it is needed.
    A write that raises Unavailable may have been stored: its message says so where that is not known.
    `delete` and `replace` work for users whose records are damaged. `prefix` begins the name of every key.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "relaygr:",
        timeout_s: float = 0.25,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = (url, prefix, timeout_s)
        if not 0 < timeout_s < 3600:
            raise InvalidInput("timeout_s", f"must be a time of more than 0 seconds, not {timeout_s}")
        self._where = without_password(url)
        try:
            self._client = redis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),  # when to ask again is decided here
            )
        except ValueError:
            known = "redis://host:6379/0, other characters than letters and digits of a password as %40"
            raise InvalidInput("store", f"is {self._where!r}; write it as {known}") from None  # it may show some of it
        self._prefix = prefix.encode()
        self._closed = False
        self._now = now
        self._quiet_until = 0.0
        self._quiet = threading.Lock()
        self._checked, self._checking = False, threading.Lock()
        try:
            self._check()
        except Unavailable as error:  # it may come: servers start without it, and ask again
            _log.warning("the store does not answer yet: %s", error)

    def users(self) -> Iterator[str]:
        begin = self._prefix + b"user:"
        pattern = b"".join(b"\\" + bytes((byte,)) if byte in b"*?[]^-\\" else bytes((byte,)) for byte in begin) + b"*"
        seen: set[bytes] = set()  # the server may name one twice
        cursor: Any = 0
        while True:
            cursor, keys = self._asked(partial(self._client.scan, cursor, match=pattern, count=1024))
            for key in keys:
                if key not in seen:
                    seen.add(key)
                    yield key[len(begin) :].decode()
            if not int(cursor):
                return

    def close(self) -> None:
        self._closed = True
        self._client.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopened, self._options)

    def _layout(self) -> bytes:
        self._client.setnx(self._prefix + b"layout", LAYOUT)
        found = self._client.get(self._prefix + b"layout")
        return found if isinstance(found, bytes) else b""

    def _run(self, work: Callable[[Records], _T], *, write: bool = False) -> _T:
        records = RedisRecords(self._fetch)
        for _ in range(TRIES):
            try:
                result = work(records)
            except Changed:
                records.writes.clear()
                continue
            if not records.writes or self._commit(records.writes):
                return result
            records.forget()
        raise Overloaded(f"{self._where}: others write the same users all the time")

    def _fetch(self, wanted: Fields) -> dict[bytes, list[bytes | None]]:
        def ask() -> list[Any]:
            # One command is one moment by itself, and answered even by a server that has no memory for more.
            pipeline = self._client.pipeline(transaction=len(wanted) > 1)
            for key, fields in wanted.items():
                pipeline.hmget(self._key(key), list(fields))
            return pipeline.execute()

        return dict(zip(wanted, self._asked(ask), strict=True))

    def _commit(self, writes: dict[bytes, RedisWrite]) -> bool:
        """Whether they were stored; else another wrote one of the users meanwhile."""
        keys = [self._key(key) for key in writes]
        arguments: list[bytes] = [write.before or b"" for write in writes.values()]
        for write in writes.values():
            arguments += (b"1" if write.anew else b"0", b"%d" % len(write.fields))
            for field, value in write.fields.items():
                arguments += (field, value)
        try:
            return bool(self._asked(lambda: self._client.eval(_COMMIT, len(keys), *keys, *arguments)))
        except Unavailable as error:
            if isinstance(error.__cause__, _LOST) and self._is_stored(writes):
                return True
            raise

    def _is_stored(self, writes: dict[bytes, RedisWrite]) -> bool:
        """After a commit that nobody answered. A record that every write changes tells."""
        key, write = next(iter(writes.items()))
        try:
            found = self._client.hget(self._key(key), "r")
        except redis.RedisError as error:
            raise Unavailable(f"{self._where} did not answer: the write may have been stored, or may not") from error
        if found == write.after:
            return True
        raise Unavailable(f"{self._where} did not answer: the write may have been stored, or may not")

    def _key(self, user: bytes) -> bytes:
        return self._prefix + b"user:" + user

    def _check(self) -> None:
        """That its layout is the one read here; once, when it answers."""
        with self._checking:
            if self._checked:
                return
            layout = self._ask(self._layout)
            if layout != LAYOUT:
                raise StoreError(
                    f"{self._where} is laid out as {layout.decode(errors='replace')!r}, but this version reads only "
                    f"{LAYOUT.decode()!r}: name another database or prefix"
                )
            self._checked = True

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """What the server answers, if its layout is the one read here."""
        if not self._checked:
            self._check()
        return self._ask(ask)

    def _ask(self, ask: Callable[[], Any]) -> Any:
        """What the server answers. While it is left alone after a failure, Unavailable at once."""
        if self._closed:
            raise Unavailable(f"the store at {self._where} is closed")
        with self._quiet:
            now = self._now()
            if now < self._quiet_until:
                raise Unavailable(f"{self._where} did not answer a moment ago")
            if self._quiet_until:
                self._quiet_until = now + QUIET_S  # this call finds out for the others
        try:
            answer = ask()
        except redis.RedisError as error:
            raise self._explained(error) from error
        self._quiet_until = 0.0
        return answer

    def _explained(self, error: redis.RedisError) -> RelayError:
        if isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM" in str(error):
            return StoreFull(f"{self._where} has no memory left: {error}")
        if isinstance(error, _LOST):
            self._quiet_until = self._now() + QUIET_S
            return Unavailable(f"{self._where} cannot be reached, or does not answer: {error}")
        return StoreError(f"{self._where} refuses: {error}")


_LOST: Final = (redis.ConnectionError, redis.TimeoutError)


def _reopened(url: str, prefix: str, timeout_s: float) -> RedisStore:
    return RedisStore(url, prefix=prefix, timeout_s=timeout_s)
