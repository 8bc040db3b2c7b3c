"""Fresh models feel everything they read, by far more than the tolerance: else tests of equality would be hollow."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from oracle import TOLERANCE, row
from paged import VARIANTS, Pool, User, random_history, small_model
from relaygr.history import History
from relaygr.model import AppendBatch, AppendRow, Candidates, RankingModel

every_variant = pytest.mark.parametrize("variant", VARIANTS)
Scores = npt.NDArray[np.float32]

CANDIDATES = Candidates(np.arange(16) * 31)
TOGETHER = 8
"""Changed histories run in one batch."""


def threshold(scores: Scores) -> float:
    """100 times what equal scores may differ by."""
    return 100 * TOLERANCE * max(1.0, float(np.abs(scores).max()))


def user_of(history: History) -> User:
    return User(history, np.empty(0, np.int64), CANDIDATES, None)


def least_moves(model: RankingModel, history: History, changes: list[tuple[int, History]]) -> npt.NDArray[np.float64]:
    """For each change of one behaviour, the largest move of a score, in units of the threshold.

    What lies before a change is kept from the unchanged history: that it stays the same is another test's promise.
    """
    rng = np.random.default_rng(0)
    base = Pool(model, [user_of(history)], rng).append_all()
    before = base.score()[0]
    moves: list[float] = []
    for first in range(0, len(changes), TOGETHER):
        some = changes[first : first + TOGETHER]
        pool = Pool(model, [user_of(changed) for _, changed in some], rng)
        rows = []
        for u, (at, changed) in enumerate(some):
            pool.pages[pool.owned[u]] = base.pages[base.owned[0]]
            rows.append(AppendRow(changed, np.empty(0, np.int64), at, len(history), pool.owned[u]))
        model.append(AppendBatch.pack(model.config, rows), pool.pages)
        moves += [float(np.abs(scores - before).max()) for scores in pool.score()]
    return np.array(moves) / threshold(before)


def other_item(history: History, at: int) -> History:
    """Another item, with another row of the table."""
    items = history.items.copy()
    items[at] = (row(int(items[at]), 500) + 1) % 500
    return History(items, history.actions, history.timestamps)


def other_action(history: History, at: int) -> History:
    actions = history.actions.copy()
    actions[at] = (actions[at] + 1) % 8
    return History(history.items, actions, history.timestamps)


def spread(length: int, count: int) -> list[int]:
    """`count` places from the first to the last."""
    return sorted({round(i * (length - 1) / (count - 1)) for i in range(count)})


@every_variant
@pytest.mark.parametrize("change", [other_item, other_action])
def test_every_single_behaviour_moves_a_score(variant: str, change: Any) -> None:
    model = small_model(variant, layers=2, dim=32, heads=2)
    history = random_history(np.random.default_rng(1), 192)
    moves = least_moves(model, history, [(at, change(history, at)) for at in range(len(history))])
    assert moves.min() >= 1, f"behaviour {moves.argmin()} moves no score enough: {moves.min():.2f} of the threshold"


@every_variant
@pytest.mark.parametrize("change", [other_item, other_action])
@pytest.mark.parametrize(
    ("layers", "dim", "heads", "length"),
    [(2, 64, 4, 64), (2, 64, 2, 512), (3, 48, 2, 300), (4, 32, 2, 512), (4, 64, 4, 512), (1, 32, 2, 512)],
)
def test_behaviours_move_scores_at_all_sizes_and_lengths(
    variant: str, change: Any, layers: int, dim: int, heads: int, length: int
) -> None:
    for seed in (1, 2):
        model = small_model(variant, layers=layers, dim=dim, heads=heads, seed=seed)
        history = random_history(np.random.default_rng([seed, length]), length)
        moves = least_moves(model, history, [(at, change(history, at)) for at in spread(length, 12)])
        assert moves.min() >= 1, f"{moves.round(2)} of the threshold"


def moved(model: RankingModel, one: User, other: User) -> bool:
    rng = np.random.default_rng(0)
    before, after = (Pool(model, [user], rng).append_all().score()[0] for user in (one, other))
    return bool(np.abs(after - before).max() >= threshold(before))


@every_variant
def test_context_request_and_candidates_move_scores(variant: str) -> None:
    rng = np.random.default_rng(4)
    model = small_model(variant)
    features, request = rng.normal(size=(16, 2)).astype(np.float32), rng.normal(size=3).astype(np.float32)
    user = User(random_history(rng, 300), np.arange(10, 14), Candidates(CANDIDATES.items, features), request)
    for j in range(4):
        ids = user.context.copy()
        ids[j] += 1
        assert moved(model, user, replace(user, context=ids)), f"context id {j}"
    assert moved(model, user, replace(user, context=user.context[:3]))
    assert moved(model, user, replace(user, context=user.context[[1, 0, 2, 3]])), "slots of the context"
    for j in range(3):
        assert moved(model, user, replace(user, request=request + np.eye(3, dtype=np.float32)[j])), f"request {j}"
    assert moved(model, user, replace(user, request=None))
    for j in range(2):
        shifted = features + np.eye(2, dtype=np.float32)[j]
        assert moved(model, user, replace(user, candidates=Candidates(CANDIDATES.items, shifted))), f"feature {j}"
    assert moved(model, user, replace(user, candidates=CANDIDATES))
    assert moved(model, user, replace(user, candidates=Candidates(CANDIDATES.items + 1, features)))


@every_variant
def test_order_times_and_length_move_scores(variant: str) -> None:
    rng = np.random.default_rng(4)
    model = small_model(variant)
    history = random_history(rng, 200)
    swapped = history.items.copy()
    swapped[[50, 120]] = swapped[[120, 50]]
    later = history.timestamps.copy()
    later[150:] += 10**7
    for other in (
        History(swapped, history.actions, history.timestamps),
        History(history.items, history.actions, later),
        history[:199],
        history[1:],
    ):
        assert moved(model, user_of(history), user_of(other))
