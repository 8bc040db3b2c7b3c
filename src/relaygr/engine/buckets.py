"""Sizes of batches that a device is prepared for."""

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from relaygr.model.config import Family
from relaygr.model.packed import BatchShape

__all__ = [
    "APPEND_BUCKETS",
    "SCORE_BUCKETS",
    "Bucket",
    "Group",
    "ScoreGroups",
    "append_buckets",
    "append_groups",
    "grouped",
    "score_buckets",
    "score_groups",
]


class Bucket(NamedTuple):
    """Batches of up to `users` users with up to `rows` rows each."""

    users: int
    rows: int

    @property
    def total(self) -> int:
        return self.users * self.rows

    def shape(self, pages: int, features: int | None) -> BatchShape:
        """Its inputs, for users of up to so many pages; `features` as in `BatchShape`."""
        return BatchShape(self.users, self.total, pages, features)


def _buckets(users: Iterable[int], rows: Iterable[int], most: int) -> tuple[Bucket, ...]:
    """The smallest first."""
    every = [Bucket(u, r) for u in users for r in rows]
    return tuple(sorted((bucket for bucket in every if bucket.total <= most), key=lambda bucket: bucket.total))


SCORE_BUCKETS: Final = _buckets((1, 2, 4, 8, 16, 32), (128, 512, 2048), 32768)
"""Of scores: rows are a user's candidates."""
APPEND_BUCKETS: Final = _buckets((1, 4, 16), (128, 1024, 2048, 4096, 8192, 16384), 16384)
"""Of appends: rows are a user's new tokens. Longer appends are several of the longest."""
_NARROW: Final = 8192
"""At most so many rows in buckets for several users, where padding costs as much as what it stands for."""


def score_buckets(family: Family) -> tuple[Bucket, ...]:
    """Of a model of this family: products of HSTU skip what is padding, so there much of it costs little."""
    return SCORE_BUCKETS if family == "hstu" else _narrow(SCORE_BUCKETS)


def append_buckets(family: Family) -> tuple[Bucket, ...]:
    """Of a model of this family, as with scores."""
    return APPEND_BUCKETS if family == "hstu" else _narrow(APPEND_BUCKETS)


def _narrow(buckets: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
    return tuple(bucket for bucket in buckets if bucket.users == 1 or bucket.total <= _NARROW)


class Group(NamedTuple):
    """Rows of a step that run together, by their index; replayed where they have a bucket."""

    members: Sequence[int]
    bucket: Bucket | None
    rows: tuple[int, ...]
    """How many each member has."""


class ScoreGroups(NamedTuple):
    """Groups of scores, and where those of each user lie among all of them."""

    groups: Sequence[Group]
    places: Sequence[slice]
    total: int

    @staticmethod
    def of(groups: Sequence[Group], rows: Sequence[int]) -> "ScoreGroups":
        """What comes out of groups lies one behind the other, as their members do in each."""
        order = [member for group in groups for member in group.members]
        ends = dict(zip(order, itertools.accumulate(rows[member] for member in order), strict=True))
        places = tuple(slice(ends[member] - count, ends[member]) for member, count in enumerate(rows))
        return ScoreGroups(groups, places, sum(rows))


@functools.lru_cache(4096)
def score_groups(family: Family, rows: tuple[int, ...]) -> ScoreGroups:
    """Scores of users with so many candidates each. Steps are much alike, so what was found is remembered."""
    return ScoreGroups.of(grouped(score_buckets(family), rows), rows)


@functools.lru_cache(4096)
def append_groups(family: Family, rows: tuple[int, ...]) -> tuple[Group, ...]:
    """The same of appends with so many new tokens each."""
    return grouped(append_buckets(family), rows)


def grouped(buckets: tuple[Bucket, ...], rows: tuple[int, ...]) -> tuple[Group, ...]:
    """Share out users with so many rows each over buckets: the largest first, as many together as some bucket takes."""
    groups = []
    order = sorted(range(len(rows)), key=lambda index: -rows[index])
    while order:
        most = max((bucket.users for bucket in buckets if bucket.rows >= rows[order[0]]), default=0)
        members, order = tuple(order[: most or 1]), order[most or 1 :]
        bucket = _bucket_for(buckets, len(members), rows[members[0]])
        groups.append(Group(members, bucket, tuple(rows[member] for member in members)))
    return tuple(groups)


def _bucket_for(buckets: tuple[Bucket, ...], users: int, rows: int) -> Bucket | None:
    """The smallest that takes so many users with so many rows at most; None if none does."""
    return next((bucket for bucket in buckets if bucket.users >= users and bucket.rows >= rows), None)
