"""A catalogue keeps what it was given, finds items by id, and refuses what is no catalogue."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from relaygr.cascade import Catalogue
from relaygr.errors import InvalidInput

IDS = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=30, unique=True)


def make(ids: list[int], dim: int = 3, titles: list[str] | None = None) -> Catalogue:
    embeddings = np.random.default_rng(len(ids)).standard_normal((len(ids), dim))
    return Catalogue(ids, embeddings, titles)


@given(ids=IDS, dim=st.integers(1, 5), data=st.data())
def test_what_is_loaded_is_what_was_saved(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], dim: int, data: st.DataObject
) -> None:
    titles = data.draw(st.none() | st.lists(st.text(max_size=5), min_size=len(ids), max_size=len(ids)))
    catalogue = make(ids, dim, titles)
    path = tmp_path_factory.mktemp("catalogue") / "items.safetensors"
    catalogue.save(path)
    loaded = Catalogue.load(path)
    assert np.array_equal(loaded.ids, catalogue.ids)
    assert loaded.embeddings.tobytes() == catalogue.embeddings.tobytes()
    assert loaded.titles == catalogue.titles
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@given(scale=st.floats(1e-3, 1e3))
def test_embeddings_have_length_one_and_keep_their_direction(scale: float) -> None:
    raw = np.random.default_rng(1).standard_normal((20, 8)) * scale
    catalogue = Catalogue(np.arange(20), raw)
    assert np.allclose(np.linalg.norm(catalogue.embeddings, axis=1), 1, atol=1e-6)
    assert np.allclose(catalogue.embeddings, raw / np.linalg.norm(raw, axis=1, keepdims=True), atol=1e-6)
    again = Catalogue(catalogue.ids, catalogue.embeddings)
    assert again.embeddings.tobytes() == catalogue.embeddings.tobytes()


@given(ids=IDS, asked=st.lists(st.integers(0, 2**63 - 1), max_size=10))
def test_every_item_is_found_where_it_stands_and_no_other_is(ids: list[int], asked: list[int]) -> None:
    items = [*asked, *ids[::2]]
    found = make(ids).rows(np.array(items, np.int64))
    assert found.tolist() == [ids.index(item) if item in ids else -1 for item in items]


def test_titles_are_found_by_item() -> None:
    catalogue = make([7, 3], titles=["seven", "three"])
    assert [catalogue.title(item) for item in (3, 7, 4)] == ["three", "seven", None]
    assert make([7]).title(7) is None


def test_a_random_catalogue_is_the_same_for_the_same_seed() -> None:
    first, same, other = (Catalogue.random(50, 4, seed) for seed in (1, 1, 2))
    assert len(first) == 50
    assert first.dim == 4
    assert first.ids.tolist() == list(range(50))
    assert np.array_equal(first.embeddings, same.embeddings)
    assert not np.array_equal(first.embeddings, other.embeddings)


def test_a_catalogue_cannot_be_changed() -> None:
    ids, embeddings = np.arange(3), np.eye(3, dtype=np.float32)
    catalogue = Catalogue(ids, embeddings)
    ids[0], embeddings[0] = 9, 0
    assert catalogue.ids[0] == 0
    assert catalogue.embeddings[0].tolist() == [1, 0, 0]
    for array in (catalogue.ids, catalogue.embeddings):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("ids", ([], np.ones((0, 2)))),
        ("ids", ([1, 1], np.ones((2, 2)))),
        ("ids", ([-1], np.ones((1, 2)))),
        ("ids", ([0.5], np.ones((1, 2)))),
        ("embeddings", ([1, 2], np.ones((1, 2)))),
        ("embeddings", ([1], np.ones(1))),
        ("embeddings", ([1], np.ones((1, 0)))),
        ("embeddings", ([1], [["a"]])),
        ("embeddings", ([1], [[np.nan]])),
        ("embeddings", ([1, 2], [[1.0], [0.0]])),
        ("titles", ([1], [[1.0]], [])),
        ("titles", ([1], [[1.0]], [3])),
    ],
)
def test_what_is_no_catalogue_is_refused_by_name(field: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidInput) as refused:
        Catalogue(*arguments)
    assert refused.value.field == field


@pytest.mark.parametrize(("field", "arguments"), [("items", (0, 4, 0)), ("dim", (4, 0, 0)), ("seed", (4, 4, "x"))])
def test_a_random_catalogue_of_nothing_is_refused(field: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidInput) as refused:
        Catalogue.random(*arguments)
    assert refused.value.field == field


FORMAT = {"format": "relaygr-catalogue-1"}
IDS_OF_ONE, ROW = np.array([1]), np.ones((1, 1), np.float32)


def titled(text: str) -> dict[str, Any]:
    return {"ids": IDS_OF_ONE, "embeddings": ROW, "titles": np.frombuffer(text.encode(), np.uint8)}


@pytest.mark.parametrize(
    ("field", "tensors", "metadata"),
    [
        ("path", {"ids": IDS_OF_ONE, "embeddings": ROW}, None),
        ("path", {"ids": IDS_OF_ONE, "embeddings": ROW}, {"format": "another"}),
        ("embeddings", {"ids": IDS_OF_ONE}, FORMAT),
        ("ids", {"embeddings": ROW}, FORMAT),
        ("prices", {"ids": IDS_OF_ONE, "embeddings": ROW, "prices": ROW}, FORMAT),
        ("ids", {"ids": ROW[0], "embeddings": ROW}, FORMAT),
        ("titles", titled("{"), FORMAT),
        ("titles", titled(json.dumps({"0": "a"})), FORMAT),
        ("titles", titled(json.dumps(["a", "b"])), FORMAT),
    ],
)
def test_files_that_hold_no_catalogue_are_refused(
    tmp_path: Path, field: str, tensors: dict[str, Any], metadata: dict[str, str] | None
) -> None:
    save_file(tensors, tmp_path / "file", metadata=metadata)
    with pytest.raises(InvalidInput) as refused:
        Catalogue.load(tmp_path / "file")
    assert refused.value.field == field


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pickled").write_bytes(pickle.dumps(([1], [[1.0]])))
    for name in ("pickled", "missing"):
        with pytest.raises(InvalidInput, match="path"):
            Catalogue.load(tmp_path / name)
