"""MovieLens, in the formats of its releases, and in RecBole's atomic files."""

import csv as lines
import gzip
import io
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as csv

from relaygr.errors import InvalidInput
from relaygr.train.dataset import Facts, require_columns
from relaygr.train.importing import Source, column_integers, read_csv

__all__ = ["LABELS", "read_movielens"]

LABELS: Final = ("liked", "loved")
"""Rated 4 stars or more; rated 4.5 or more."""
_CITATION: Final = (
    "F. Maxwell Harper and Joseph A. Konstan. 2015. The MovieLens Datasets: History and Context. "
    "ACM Transactions on Interactive Intelligent Systems 5, 4, Article 19."
)
_LICENCE: Final = "MovieLens, GroupLens Research: research use under the conditions of its README; see LICENCE.txt"
_ML_1M: Final = (
    "MovieLens 1M, GroupLens Research: research use under the conditions of its README; it may not be redistributed"
)
_RATING: Final = "userId", "movieId", "rating", "timestamp"


def read_movielens(folder: Path) -> Source:
    """Whatever release lies in `folder`: ratings.dat (1M, 10M), ratings.csv, plain or gzipped (latest-small, latest,
    20M, 25M, 32M), u.data (100K), or one .inter file with its .item file beside it."""
    inter = sorted(folder.glob("*.inter"))
    if (folder / "ratings.dat").exists():
        ratings, titles = _dat(folder / "ratings.dat"), _dat_titles(folder / "movies.dat")
    elif found := _either(folder / "ratings.csv"):
        ratings, titles = read_csv(found), _csv_titles(_either(folder / "movies.csv"))
        require_columns(found, ratings.column_names, _RATING)
    elif (folder / "u.data").exists():
        ratings, titles = _headless(folder / "u.data", "\t"), _u_titles(folder / "u.item")
    elif inter:
        ratings, titles = _inter(inter[0]), _inter_titles(inter[0].with_suffix(".item"))
    else:
        raise InvalidInput(
            "source", f"{folder} holds no ratings.dat, ratings.csv, ratings.csv.gz, u.data or .inter file"
        )
    readme = next((path for name in ("README.txt", "README", "README.html") if (path := folder / name).exists()), None)
    stars = _stars(ratings, folder)
    name = folder.name
    return Source(
        Facts(
            name=name,
            labels=LABELS,
            actions=10,
            licence=_ML_1M if "1m" in name.lower() else _LICENCE,
            citation=_CITATION,
            notes=("An action is a rating, in half stars: 0 is half a star, 9 is five stars.",),
        ),
        ratings["userId"].combine_chunks(),
        ratings["movieId"].combine_chunks(),
        np.rint(stars * 2).astype(np.int64) - 1,
        column_integers(ratings, "timestamp", folder),
        np.stack((stars >= 4, stars >= 4.5), axis=1).astype(np.int8),
        titles,
        readme.read_text(encoding="utf-8", errors="replace") if readme else "",
    )


def _stars(ratings: pa.Table, source: Path) -> npt.NDArray[np.float64]:
    column = ratings["rating"]
    if column.null_count:
        raise InvalidInput("rating", f"of {source} is missing in {column.null_count} rows")
    try:
        stars: npt.NDArray[np.float64] = column.cast(pa.float64()).to_numpy()
    except pa.ArrowException as error:
        raise InvalidInput("rating", f"of {source} must be numbers: {error}") from error
    halves = stars * 2
    if not ((halves == np.rint(halves)) & (halves >= 1) & (halves <= 10)).all():
        raise InvalidInput("rating", f"of {source} must be from 0.5 to 5 in steps of 0.5")
    return stars


def _either(path: Path) -> Path | None:
    """The file, or the same gzipped."""
    packed = path.with_name(path.name + ".gz")
    return path if path.exists() else packed if packed.exists() else None


def _dat(path: Path) -> pa.Table:
    """user::item::rating::time, without a header."""
    return _headless(pa.BufferReader(path.read_bytes().replace(b"::", b",")), ",", path)


def _headless(source: Path | pa.BufferReader, delimiter: str, path: Path | None = None) -> pa.Table:
    path = path or Path(str(source))
    try:
        return csv.read_csv(
            source,
            read_options=csv.ReadOptions(column_names=list(_RATING)),
            parse_options=csv.ParseOptions(delimiter=delimiter),
        )
    except (OSError, pa.ArrowException) as error:
        raise InvalidInput(
            "source", f"{path} does not have user, item, rating and time in each row: {error}"
        ) from error


def _dat_titles(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    rows = (line.split("::") for line in path.read_text(encoding="latin-1").splitlines())
    return {row[0]: row[1] for row in rows if len(row) >= 2}


def _csv_titles(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    rows = lines.DictReader(io.StringIO(text))
    require_columns(path, rows.fieldnames or (), ("movieId", "title"))
    return {row["movieId"]: row["title"] for row in rows}


def _u_titles(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    rows = (line.split("|") for line in path.read_text(encoding="latin-1").splitlines())
    return {row[0]: row[1] for row in rows if len(row) >= 2}


def _inter(path: Path) -> pa.Table:
    """Tab-separated, a header of name:type."""
    table = read_csv(path, "\t", quoted=False)
    table = table.rename_columns([name.partition(":")[0] for name in table.column_names])
    require_columns(path, table.column_names, ("user_id", "item_id", "rating", "timestamp"))
    return table.select(["user_id", "item_id", "rating", "timestamp"]).rename_columns(list(_RATING))


def _inter_titles(path: Path) -> dict[str, str]:
    """Ids in the order of the item file; where the ids are not the titles themselves, the title's column."""
    if not path.exists():
        return {}
    table = read_csv(path, "\t", quoted=False)
    table = table.rename_columns([name.partition(":")[0] for name in table.column_names])
    require_columns(path, table.column_names, ("item_id",))
    ids = [str(value) for value in table["item_id"].to_pylist()]
    titles = table["movie_title"].to_pylist() if "movie_title" in table.column_names else ids
    return {
        identity: identity if identity.startswith(str(title)) else str(title)
        for identity, title in zip(ids, titles, strict=True)
    }
