"""Files are written whole or not at all, and can be read by whom new files can be read by; one process holds a lock."""

import stat
from pathlib import Path

import pytest

from relaygr.cascade.catalogue import Catalogue
from relaygr.errors import InvalidInput, Unavailable
from relaygr.files import alone, replacing
from relaygr.model import checkpoint
from relaygr.train.recipe import Recipe
from relaygr.train.trainer import fresh_model
from small_data import cyclic


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_written_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with replacing(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def break_off() -> None:
        with replacing(path) as partial:
            partial.write_text("ne")
            raise KeyError

    with pytest.raises(KeyError):
        break_off()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_models_and_catalogues_have_the_mode_of_new_files_whatever_was_left_behind(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    left = tmp_path / "model.safetensors.partial"
    left.touch(0o600)
    recipe = Recipe.from_dict({"name": "x", "model": {"family": "hstu", "layers": 1, "dim": 8, "heads": 1}})
    checkpoint.save(fresh_model(recipe, cyclic(), 0), tmp_path / "model.safetensors")
    Catalogue.random(4, 2, 0).save(tmp_path / "items.safetensors")
    assert mode(tmp_path / "model.safetensors") == mode(tmp_path / "usual")
    assert mode(tmp_path / "items.safetensors") == mode(tmp_path / "usual")
    assert not left.exists()


def test_a_lock_is_held_by_one_and_let_go(tmp_path: Path) -> None:
    lock = tmp_path / "new" / "a.lock"
    with alone(lock, "out", "first"), pytest.raises(Unavailable, match="taken"), alone(lock, "out", "taken"):
        pass
    with alone(lock, "out", "again"):
        pass


def test_a_file_where_the_folder_of_a_lock_is_wanted_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match=r"^out: .*cannot be used"), alone(tmp_path / "file" / "a.lock", "out", ""):
        pass
