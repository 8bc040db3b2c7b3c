"""What `serve all` begins with."""

from pathlib import Path

import numpy as np

from relaygr import default
from relaygr.cascade.catalogue import Catalogue
from relaygr.history import LmdbStore
from relaygr.serving.provision import World, provision
from relaygr.serving.settings import DataSettings

SMALL = World(users=8, typical=300)


def test_model_items_users_and_the_terms_are_put_there(tmp_path: Path) -> None:
    provision(tmp_path, world=SMALL)
    assert (tmp_path / "model.safetensors").read_bytes() == default.MODEL.read_bytes()
    assert (tmp_path / "LICENCE.txt").read_bytes() == default.LICENCE.read_bytes()
    assert Catalogue.load(tmp_path / "items.safetensors").titles == default.catalogue().titles
    with LmdbStore(tmp_path / "store", readonly=True) as store:
        assert sorted(store.users()) == [f"user-{user}" for user in range(8)]
        assert store.read("user-3").items.max() < default.ITEMS


def test_what_is_there_or_named_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "items.safetensors").write_text("mine")
    provision(tmp_path, named=DataSettings(model="elsewhere", store="elsewhere"), world=SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["items.safetensors"]
    assert (tmp_path / "items.safetensors").read_text() == "mine"


def test_the_same_seed_makes_the_same_users_and_lengths_follow_the_world() -> None:
    one, same, other = (World(users=40, typical=900, seed=seed).histories(2_000_000_000) for seed in (1, 1, 2))
    assert one == same
    assert one != other
    lengths = [len(history) for history in one.values()]
    assert 500 < np.median(lengths) < 1500
    assert all(2_000_000_000 - 3600 <= history.timestamps[-1] < 2_000_000_000 for history in one.values())
