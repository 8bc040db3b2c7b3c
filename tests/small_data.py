"""Small data sets whose behaviours follow a rule, so that there is something to learn."""

import numpy as np

from relaygr.train.dataset import Behaviours, Dataset, Facts, Items, Ties

__all__ = ["ITEMS", "cyclic", "rows_of"]

ITEMS = 30


def cyclic(users: int = 40, length: int = 24, *, ties: Ties = "file", seed: int = 0) -> Dataset:
    """Each user walks round the items by one step, from a place of their own; they like even items and
    love multiples of 3. Histories are of `length` and up to 8 less.
    """
    return Dataset(Facts("cyclic", ("liked", "loved"), 2), _items(), rows_of(users, length, seed), ties=ties)


def rows_of(users: int = 40, length: int = 24, seed: int = 0) -> Behaviours:
    random = np.random.default_rng(seed)
    counts = length - random.integers(0, 9, users)
    owners = np.repeat(np.arange(users), counts)
    places = np.concatenate([np.arange(count) for count in counts])
    items = (random.integers(0, ITEMS, users)[owners] + places) % ITEMS
    labels = np.stack((items % 2 == 0, items % 3 == 0), axis=1).astype(np.int8)
    times = 1_000_000 + places * 60 + random.integers(0, 40, len(places))
    names = tuple(f"u{user}" for user in range(users))
    return Behaviours(owners, names, items, labels[:, 0].astype(np.int32), times, labels)


def _items() -> Items:
    return Items(tuple(str(100 + item) for item in range(ITEMS)), tuple(f"Film {item}" for item in range(ITEMS)))
