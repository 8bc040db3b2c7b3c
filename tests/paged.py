"""Users over pages that lie anywhere: what tests of models run. Import it in any test as `paged`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from relaygr.history import History
from relaygr.kernels import PageLayout
from relaygr.model import AppendBatch, AppendRow, Candidates, RankingModel, ScoreBatch, ScoreRow, build_model

__all__ = ["VARIANTS", "Pool", "User", "bits", "random_history", "random_user", "small_model"]

VARIANTS: Final[dict[str, dict[str, Any]]] = {
    "meta": {"family": "hstu", "silu_on": "u", "combine": "concat", "norm_eps": 1e-6},
    "nvidia": {"family": "hstu", "silu_on": "uvqk", "combine": "gate", "norm_eps": 1e-5},
    "softmax": {"family": "softmax"},
}


def small_model(variant: str, **overrides: Any) -> RankingModel:
    """A model of a named variant that reads everything a model can read."""
    arguments = {
        **{"layers": 2, "dim": 32, "heads": 2, "items": 500, "seed": 1, "actions": 8, "tasks": 2},
        **{"request_features": 3, "candidate_features": 2, "contexts": 50},
        **VARIANTS[variant],
        **overrides,
    }
    return build_model(arguments.pop("family"), **arguments)


@dataclass(frozen=True)
class User:
    history: History
    context: npt.NDArray[np.int64]
    candidates: Candidates
    request: npt.NDArray[np.float32] | None

    @property
    def tokens(self) -> int:
        return len(self.context) + len(self.history)


def random_history(rng: np.random.Generator, behaviours: int, *, actions: int = 8, largest: int = 2**62) -> History:
    """Ids of all sizes, gaps from none to years."""
    bits = rng.integers(1, largest.bit_length(), behaviours)
    items = rng.integers(0, 2**bits)
    gaps = rng.integers(0, 10 ** rng.integers(0, 9, behaviours)) * rng.integers(0, 2, behaviours)
    return History(items, rng.integers(0, actions, behaviours), 1_700_000_000 + np.cumsum(gaps))


def random_user(
    rng: np.random.Generator, model: RankingModel, *, behaviours: int, context: int = 0, candidates: int = 5
) -> User:
    """Features are there half of the time."""
    config = model.config
    features = rng.normal(size=(candidates, config.candidate_features)) if rng.integers(2) else None
    request = rng.normal(size=config.request_features).astype(np.float32) if rng.integers(2) else None
    return User(
        random_history(rng, behaviours, actions=config.actions),
        rng.integers(0, 200, context),
        Candidates(rng.integers(0, 2 * config.items, candidates), features),
        request,
    )


class Pool:
    """Pages of several users, dealt at random from a pool in which everything not written is NaN."""

    def __init__(self, model: RankingModel, users: Sequence[User], rng: np.random.Generator, *, spare: int = 3) -> None:
        self.model, self.users = model, list(users)
        counts = [PageLayout.count(user.tokens) for user in self.users]
        order = iter(rng.permutation(sum(counts) + spare).tolist())
        self.pages = model.layout.allocate(sum(counts) + spare).fill_(torch.nan)
        self.owned = [[next(order) for _ in range(count)] for count in counts]
        self.free = list(order)

    def append(self, who: Sequence[int], spans: Sequence[tuple[int, int]]) -> None:
        """Tokens low … high of each of these users, in one batch."""
        rows = [
            AppendRow(self.users[u].history, self.users[u].context, low, high, self.owned[u])
            for u, (low, high) in zip(who, spans, strict=True)
        ]
        self.model.append(AppendBatch.pack(self.model.config, rows), self.pages)

    def append_all(self) -> "Pool":
        self.append(range(len(self.users)), [(0, user.tokens) for user in self.users])
        return self

    def append_split(self, rng: np.random.Generator, *, pieces: int) -> "Pool":
        """Everything, each user cut at random into that many pieces at most, in random batches."""
        left = {}
        for u, user in enumerate(self.users):
            cuts = sorted({0, user.tokens, *rng.integers(0, user.tokens + 1, pieces - 1).tolist()})
            left[u] = list(pairwise(cuts))
        while left := {u: spans for u, spans in left.items() if spans}:
            who = rng.permutation(list(left))[: rng.integers(1, len(left) + 1)].tolist()
            self.append(who, [left[u].pop(0) for u in who])
        return self

    def score(self, who: Sequence[int] | None = None) -> list[npt.NDArray[np.float32]]:
        """Scores of each of these users (all by default), from one batch."""
        who = range(len(self.users)) if who is None else who
        rows = [
            ScoreRow(user.candidates, user.request, len(user.history), user.tokens, self.owned[u])
            for u, user in ((u, self.users[u]) for u in who)
        ]
        scores = self.model.score(ScoreBatch.pack(self.model.config, rows), self.pages).numpy()
        return np.split(scores, np.cumsum([len(row.candidates) for row in rows])[:-1])

    def kv(self, u: int, low: int = 0, high: int | None = None) -> torch.Tensor:
        """Tokens low … high of a user's KV, [layer, k|v, token, head, dim]; a copy."""
        whole = self.pages[self.owned[u]].permute(1, 2, 0, 3, 4, 5).flatten(2, 3)
        return whole[:, :, low : self.users[u].tokens if high is None else high].clone()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """fp32 as integers: NaNs are equal to themselves, and nothing is equal to anything else."""
    return tensor.contiguous().view(torch.int32).clone()
