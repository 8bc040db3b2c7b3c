"""The default model: what comes with the package fits together, and ranks better than chance."""

import asyncio

import numpy as np

from relaygr import EngineConfig, default
from relaygr.engine import Engine
from relaygr.model import checkpoint
from relaygr.train.metrics import auc


def test_model_items_titles_and_histories_fit_together() -> None:
    config = checkpoint.load(default.MODEL).config
    assert (config.items, config.actions) == (default.ITEMS, default.ACTIONS)
    items = default.catalogue()
    assert len(items) == default.ITEMS
    assert items.titles is not None
    assert "Toy Story (1995)" in items.titles
    users = default.histories()
    assert sum(map(len, users)) == 100_004
    assert max(int(user.items.max()) for user in users) == default.ITEMS - 1
    assert max(int(user.actions.max()) for user in users) == default.ACTIONS - 1


def test_its_terms_and_card_are_beside_it() -> None:
    terms = default.LICENCE.read_text(encoding="utf-8")
    assert "redistribute the data set, including transformations" in terms
    assert "Harper" in default.CARD.read_text(encoding="utf-8")


def test_films_near_each_other_are_alike() -> None:
    """Of a well-known film, its sequels are among the nearest of 9,066."""
    items = default.catalogue()
    assert items.titles is not None
    at = items.titles.index("Star Wars: Episode V - The Empire Strikes Back (1980)")
    nearest = np.argsort(-items.embeddings @ items.embeddings[at])[1:11]
    assert any("Star Wars" in items.titles[near] for near in nearest)


def test_served_by_relay_it_tells_liked_films_from_others() -> None:
    users = [user for user in default.histories() if len(user) >= 40][:100]

    async def rank() -> list[float]:
        scores = []
        async with Engine(checkpoint.load(default.MODEL), EngineConfig(host_cache="0", max_history=128)) as engine:
            for number, user in enumerate(users):
                past = user[max(0, len(user) - 129) : len(user) - 1]
                await engine.pre_infer(f"user-{number}", past)
                scores.append(float((await engine.rank(f"user-{number}", past, user.items[-1:])).scores[0, 0]))
        return scores

    liked = np.array([user.actions[-1] >= 7 for user in users])
    assert auc(liked, np.array(asyncio.run(rank()))) > 0.65
