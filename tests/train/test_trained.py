"""What a trained folder tells the servers about items."""

from relaygr.train.dataset import Dataset, Items
from relaygr.train.recipe import Recipe
from relaygr.train.trained import catalogue_of
from relaygr.train.trainer import fresh_model
from small_data import cyclic, rows_of

SMALL = Recipe.from_dict({"name": "small", "model": {"family": "hstu", "layers": 1, "dim": 8, "heads": 1}})


def test_an_item_is_called_by_its_title_or_else_by_its_id_in_the_source() -> None:
    data = cyclic()
    bare = Dataset(data.facts, Items(data.catalogue.sources), rows_of())
    model = fresh_model(SMALL, data, 0)
    assert catalogue_of(model, data).title(3) == "Film 3"
    assert catalogue_of(model, bare).title(3) == "103"
