"""Recipes: files that say what to train."""

import re
from pathlib import Path
from typing import Any

import pytest

from relaygr.errors import InvalidInput
from relaygr.train.recipe import Recipe, names, read
from small_data import ITEMS, cyclic


@pytest.mark.parametrize("name", names())
def test_every_recipe_of_the_package_makes_a_model(name: str) -> None:
    recipe = read(name)
    assert recipe.name == name
    config = recipe.model_config(cyclic())
    assert (config.items, config.actions, config.tasks) == (ITEMS, 2, 2)
    assert Recipe.from_dict(recipe.to_dict()) == recipe


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('name = "x"\n[optimiser]\nepoch = 3', "epoch"),
        ('name = "x"\nspeed = 3', "speed"),
        ("about = 'no name'", "name"),
        ('name = "x"\n[optimiser]\nepochs = 0', "epochs"),
        ('name = "x"\n[optimiser]\nepochs = 2.5', "epochs"),
        ('name = "x"\n[optimiser]\ndropout = 1.0', "dropout"),
        ('name = "x"\n[objective]\nnext_item = 0.0', "nothing to learn"),
        ('name = "x"\nsequence = 3', "sequence"),
        ('name = "x"\nmodel = 3', "model"),
        ("name =", "recipe"),
    ],
)
def test_a_recipe_with_a_mistake_is_refused_by_the_key(text: str, field: str, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(InvalidInput, match=field):
        read(tmp_path / "x.toml")


def test_what_the_data_decide_is_no_part_of_a_recipe() -> None:
    recipe = Recipe.from_dict({"name": "x", "model": {"family": "hstu", "layers": 1, "dim": 8, "heads": 1, "items": 3}})
    with pytest.raises(InvalidInput, match="items"):
        recipe.model_config(cyclic())


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({}, r"^model.family: is missing .* needs family, layers, dim, heads, of all keys .*scale_length"),
        ({"family": "hstu", "dim": 8, "heads": 1}, r"^model.layers: is missing"),
        ({"family": "hstu", "width": 8}, r"^model.width: is no key .* it has family, layers, dim, heads, head_dim"),
        ({"family": "hstu", "layers": 1, "dim": "8", "heads": 1}, r"^dim: must be an integer"),
        ({"family": "hstu", "layers": 1, "dim": 8, "heads": 0}, r"^heads: must be at least 1"),
    ],
)
def test_a_wrong_or_missing_key_of_the_model_is_told_the_keys(model: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        Recipe.from_dict({"name": "x", "model": model}).model_config(cyclic())


def test_a_name_that_is_none_is_told_the_names() -> None:
    with pytest.raises(InvalidInput, match="ml-1m"):
        read("ml-2m")


def test_the_recipe_of_the_guide_is_one(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    found = re.search(r"```toml\n(.*?)```", guide, re.DOTALL)
    assert found is not None
    (tmp_path / "x.toml").write_text(found[1], encoding="utf-8")
    assert read(tmp_path / "x.toml").model_config(cyclic()).layers == 2
