"""`relaygr data`, as a user calls it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relaygr.cli import app
from relaygr.history import LmdbStore
from relaygr.train import dataset as datasets

ROWS = "uid,iid,ts,clicked\n" + "".join(f"u{n % 3},{n % 7},{1000 + 60 * n},{n % 2}\n" for n in range(30))
COLUMNS = ["--columns", "user=uid,item=iid,timestamp=ts,label:click=clicked"]


def call(*arguments: str | Path, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.output


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    (tmp_path / "rows.csv").write_text(ROWS)
    call("data", "import", "table", tmp_path / "rows.csv", tmp_path / "data", *COLUMNS, "--licence", "CC0")
    return tmp_path / "data"


def test_import_shows_what_came_of_it_and_the_licence(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(ROWS)
    arguments = ("data", "import", "table", tmp_path / "rows.csv")
    shown = call(*arguments, tmp_path / "data", *COLUMNS, "--licence", "CC0")
    assert "30 behaviours of 3 users, 7 items, labels click." in shown
    assert "Licence: CC0." in shown
    assert (tmp_path / "data" / "LICENCE.txt").read_text() == "CC0\n"
    told = json.loads(call(*arguments, tmp_path / "other", *COLUMNS, "--json"))
    assert (told["behaviours"], told["labels"], told["licence"]) == (30, ["click"], "not stated")


def test_a_movielens_folder_is_imported_with_its_terms(tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,2,4.5,100\n1,3,2.0,50\n")
    (tmp_path / "README.txt").write_text("Terms of the data.")
    shown = call("data", "import", "movielens", tmp_path, tmp_path / "data")
    assert "Harper" in shown
    assert (tmp_path / "data" / "LICENCE.txt").read_text() == "Terms of the data."


def test_what_is_there_is_not_written_over(imported: Path) -> None:
    said = call("data", "import", "table", imported.parent / "rows.csv", imported, *COLUMNS, status=1)
    assert "holds a data set already" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["table"], "columns"),
        (["table", "--columns", "user=uid,item=iid,timestamp=when"], "when"),
        (["movielens", *COLUMNS], "columns"),
    ],
)
def test_a_mistake_is_said_in_a_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(ROWS)
    printed = call("data", "import", arguments[0], tmp_path / "rows.csv", tmp_path / "x", *arguments[1:], status=1)
    assert said in printed
    assert "Traceback" not in printed


def test_lengthen_makes_a_data_set_that_says_it_is_synthetic(imported: Path, tmp_path: Path) -> None:
    shown = call("data", "lengthen", imported, tmp_path / "long", "--lengths", "0:100,1:200")
    assert "Synthetic." in shown
    lengths = datasets.load(tmp_path / "long").lengths
    assert lengths.min() >= 100
    assert lengths.max() <= 200


@pytest.mark.parametrize("lengths", ["long", "0.5", "0.5:x", "1:10,0:20"])
def test_lengths_that_are_none_are_refused(lengths: str, imported: Path, tmp_path: Path) -> None:
    assert "lengths" in call("data", "lengthen", imported, tmp_path / "long", "--lengths", lengths, status=1)


def test_a_store_gets_every_user_s_history(imported: Path, tmp_path: Path) -> None:
    for _ in range(2):  # a second time replaces, and does not append
        told = json.loads(call("data", "store", imported, tmp_path / "store", "--json"))
    assert (told["users"], told["behaviours"]) == (3, 30)
    data = datasets.load(imported)
    with LmdbStore(tmp_path / "store", readonly=True) as store:
        for user, name in enumerate(data.names):
            assert store.read(name) == data.history(user)


@pytest.mark.parametrize("command", [["data"], ["data", "import"], ["data", "lengthen"], ["train"], ["evaluate"]])
def test_help_teaches(command: list[str]) -> None:
    assert len(call(*command, "--help").split()) > 40
