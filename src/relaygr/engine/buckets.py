"""Sizes of batches that a device is prepared for."""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from relaygr.model.batch import AppendRow, ScoreRow
from relaygr.model.packed import BatchShape

__all__ = ["APPEND_BUCKETS", "SCORE_BUCKETS", "Bucket", "append_bucket", "score_bucket"]


class Bucket(NamedTuple):
    """Batches of up to `users` users with up to `rows` rows each."""

    users: int
    rows: int

    @property
    def total(self) -> int:
        return self.users * self.rows

    def shape(self, pages: int, features: int) -> BatchShape:
        """Its inputs, for users of up to so many pages."""
        return BatchShape(self.users, self.total, pages, features)


def _buckets(users: Iterable[int], rows: Iterable[int], most: int) -> tuple[Bucket, ...]:
    """The smallest first."""
    every = [Bucket(u, r) for u in users for r in rows]
    return tuple(sorted((bucket for bucket in every if bucket.total <= most), key=lambda bucket: bucket.total))


SCORE_BUCKETS: Final = _buckets((1, 2, 4, 8, 16, 32), (128, 512, 2048), 8192)
"""Of scores: rows are a user's candidates."""
APPEND_BUCKETS: Final = _buckets((1, 4, 16), (128, 1024, 8192), 8192)
"""Of appends: rows are a user's new tokens. Larger ones take long enough to hide their launches."""


def append_bucket(rows: Sequence[AppendRow]) -> Bucket | None:
    """The smallest that takes these; None if none does."""
    return _bucket_for(APPEND_BUCKETS, len(rows), max(row.high - row.low for row in rows))


def score_bucket(rows: Sequence[ScoreRow]) -> Bucket | None:
    """The smallest that takes these; None if none does."""
    return _bucket_for(SCORE_BUCKETS, len(rows), max(len(row.candidates) for row in rows))


def _bucket_for(buckets: tuple[Bucket, ...], users: int, rows: int) -> Bucket | None:
    return next((bucket for bucket in buckets if bucket.users >= users and bucket.rows >= rows), None)
