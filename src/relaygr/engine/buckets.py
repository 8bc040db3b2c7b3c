"""Sizes of batches that a device is prepared for."""

from collections.abc import Iterable
from typing import Final, NamedTuple

__all__ = ["APPEND_BUCKETS", "SCORE_BUCKETS", "Bucket", "bucket_for"]


class Bucket(NamedTuple):
    """Batches of up to `users` users with up to `rows` rows each."""

    users: int
    rows: int

    @property
    def total(self) -> int:
        return self.users * self.rows


def _buckets(users: Iterable[int], rows: Iterable[int], most: int) -> tuple[Bucket, ...]:
    """The smallest first."""
    every = [Bucket(u, r) for u in users for r in rows]
    return tuple(sorted((bucket for bucket in every if bucket.total <= most), key=lambda bucket: bucket.total))


SCORE_BUCKETS: Final = _buckets((1, 2, 4, 8, 16, 32), (128, 512, 2048), 8192)
"""Of scores: rows are a user's candidates."""
APPEND_BUCKETS: Final = _buckets((1, 4, 16), (128, 1024, 8192), 8192)
"""Of appends: rows are a user's new tokens. Larger ones take long enough to hide their launches."""


def bucket_for(buckets: tuple[Bucket, ...], users: int, rows: int) -> Bucket | None:
    """The smallest that takes this many users and rows of the largest of them; None if none does."""
    return next((bucket for bucket in buckets if bucket.users >= users and bucket.rows >= rows), None)
