"""MovieLens in the formats of its releases."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from relaygr.errors import InvalidInput
from relaygr.train import dataset as datasets
from relaygr.train.dataset import Dataset
from relaygr.train.importing import number
from relaygr.train.movielens import read_movielens

# user, item, stars, time: not in the order of time, and of two at one time the file's order counts
ROWS = [("7", "50", 4, 300), ("7", "10", 2, 100), ("3", "50", 5, 250), ("7", "30", 3, 100)]
TITLES = {"50": "Alpha, The (1995)", "10": "Beta (1990)", "30": "Gamma (2001)"}


def dat(folder: Path) -> None:
    (folder / "ratings.dat").write_text("".join(f"{u}::{i}::{s}::{t}\n" for u, i, s, t in ROWS))
    (folder / "movies.dat").write_text("".join(f"{i}::{title}::Drama\n" for i, title in TITLES.items()))


def csv(folder: Path) -> None:
    rows = "".join(f"{u},{i},{float(s)},{t}\n" for u, i, s, t in ROWS)
    (folder / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + rows)
    titles = "".join(f'{i},"{title}",Drama\n' for i, title in TITLES.items())
    (folder / "movies.csv").write_text("movieId,title,genres\n" + titles)


def gzipped(folder: Path) -> None:
    csv(folder)
    for name in ("ratings.csv", "movies.csv"):
        (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
        (folder / name).unlink()


def u_data(folder: Path) -> None:
    (folder / "u.data").write_text("".join(f"{u}\t{i}\t{s}\t{t}\n" for u, i, s, t in ROWS))
    titles = "".join(f"{i}|{title}|01-Jan-1995\n" for i, title in TITLES.items())
    (folder / "u.item").write_text(titles, encoding="latin-1")


def inter(folder: Path) -> None:
    rows = "".join(f"{u}\t{i}\t{s}\t{t}\n" for u, i, s, t in ROWS)
    (folder / "ml.inter").write_text("user_id:token\titem_id:token\trating:float\ttimestamp:float\n" + rows)
    titles = "".join(f"{i}\t{title}\n" for i, title in TITLES.items())
    (folder / "ml.item").write_text("item_id:token\tmovie_title:token_seq\n" + titles)


def kept(folder: Path, source: Path) -> Dataset:
    imported = number(read_movielens(source))
    datasets.save(folder, imported.facts, imported.items, imported.rows, imported.licence_text)
    return datasets.load(folder)


@pytest.mark.parametrize("write", [dat, csv, gzipped, u_data, inter], ids=lambda write: write.__name__)
def test_every_format_gives_the_same_histories_oldest_first(write: object, tmp_path: Path) -> None:
    assert callable(write)
    write(tmp_path)
    data = kept(tmp_path / "out", tmp_path)
    assert data.names == ("7", "3")
    assert data.catalogue.titles == tuple(TITLES.values())
    assert [data.catalogue.sources[item] for item in data.history(0).items] == ["10", "30", "50"]
    assert data.history(0).actions.tolist() == [3, 5, 7]  # half stars, from 0
    assert data.history(0).timestamps.tolist() == [100, 100, 300]
    np.testing.assert_array_equal(data.labels[:3], [[0, 0], [0, 0], [1, 0]])
    np.testing.assert_array_equal(data.labels[3], [1, 1])


def test_the_other_rule_for_ties_turns_behaviours_of_one_time_around(tmp_path: Path) -> None:
    csv(tmp_path)
    kept(tmp_path / "out", tmp_path)
    data = datasets.load(tmp_path / "out", ties="reversed")
    assert [data.catalogue.sources[item] for item in data.history(0).items] == ["30", "10", "50"]


def test_the_licence_comes_along(tmp_path: Path) -> None:
    csv(tmp_path)
    (tmp_path / "README.txt").write_text("The terms.")
    data = kept(tmp_path / "out", tmp_path)
    assert data.licence_text == "The terms."
    assert (tmp_path / "out" / "LICENCE.txt").read_text() == "The terms."
    assert "Harper" in data.facts.citation


def test_a_film_without_a_title_gets_its_id_for_one(tmp_path: Path) -> None:
    csv(tmp_path)
    (tmp_path / "movies.csv").write_text("movieId,title,genres\n50,Alpha,Drama\n")
    data = kept(tmp_path / "out", tmp_path)
    assert data.catalogue.sources[0] == "50"
    assert set(data.catalogue.titles or ()) == {"Alpha", "10", "30"}


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    csv(tmp_path)
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating\n1,2,3\n")
    with pytest.raises(InvalidInput, match=r"timestamp: is no column of .*userId, movieId, rating"):
        read_movielens(tmp_path)


@pytest.mark.parametrize("stars", ["5.5", "0", "4.2", "much"])
def test_a_rating_that_is_none_is_refused(stars: str, tmp_path: Path) -> None:
    csv(tmp_path)
    (tmp_path / "ratings.csv").write_text(f"userId,movieId,rating,timestamp\n1,2,{stars},5\n")
    with pytest.raises(InvalidInput, match="rating"):
        read_movielens(tmp_path)


def test_a_folder_without_ratings_is_told_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"ratings\.dat"):
        read_movielens(tmp_path)


def test_rows_cut_short_are_refused(tmp_path: Path) -> None:
    (tmp_path / "ratings.dat").write_text("1::2::3::4\n1::2\n")
    with pytest.raises(InvalidInput, match="source"):
        read_movielens(tmp_path)
