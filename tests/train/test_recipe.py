"""Recipes: files that say what to train."""

from pathlib import Path

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


def test_a_name_that_is_none_is_told_the_names() -> None:
    with pytest.raises(InvalidInput, match="ml-1m"):
        read("ml-2m")
