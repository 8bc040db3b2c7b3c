"""The items that can be recommended."""

import json
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from relaygr.errors import InvalidInput
from relaygr.files import replacing
from relaygr.history.history import frozen, index, integers

__all__ = ["Catalogue"]

_FORMAT: Final = "relaygr-catalogue-1"
_UNIT: Final = 1e-5
"""How far from 1 the length of an embedding may be that is taken as it is."""


class Catalogue:
    """Ids, int64 [N], their embeddings of length 1, float32 [N, d], and optionally their titles. Immutable.

    Embeddings of another length are scaled to 1, in a copy. Raises InvalidInput naming the field for ids that repeat
    or are negative, and for embeddings that are not finite or are zero.
    """

    __slots__ = ("_order", "embeddings", "ids", "titles")

    def __init__(self, ids: Any, embeddings: Any, titles: Any = None) -> None:
        self.ids: npt.NDArray[np.int64] = frozen(integers("ids", ids, np.int64))
        if not len(self.ids):
            raise InvalidInput("ids", "must not be empty")
        if self.ids.min() < 0:
            raise InvalidInput("ids", "must not be negative")
        self._order: npt.NDArray[np.int64] = np.argsort(self.ids, kind="stable")
        ordered = self.ids[self._order]
        if (ordered[1:] == ordered[:-1]).any():
            raise InvalidInput("ids", "must not repeat")
        self.embeddings = _unit_rows(embeddings, len(self.ids))
        self.titles: tuple[str, ...] | None = None
        if titles is not None:
            self.titles = tuple(titles)
            if len(self.titles) != len(self.ids):
                raise InvalidInput("titles", f"has {len(self.titles)} entries for {len(self.ids)} items")
            if not all(isinstance(title, str) for title in self.titles):
                raise InvalidInput("titles", "must be strings")

    @classmethod
    def random(cls, items: int, dim: int, seed: int) -> Self:
        """Items 0 … items - 1 in directions drawn at random, the same for the same arguments."""
        items, dim = index("items", items), index("dim", dim)
        for field, value in (("items", items), ("dim", dim)):
            if value < 1:
                raise InvalidInput(field, "must be at least 1")
        random = np.random.default_rng(index("seed", seed))
        return cls(np.arange(items), random.standard_normal((items, dim), dtype=np.float32))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def dim(self) -> int:
        """The width of an embedding."""
        return int(self.embeddings.shape[1])

    def rows(self, items: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where these items stand; -1 for those that are not here."""
        at = np.searchsorted(self.ids, items, sorter=self._order).clip(max=len(self.ids) - 1)
        found: npt.NDArray[np.int64] = self._order[at]
        return np.where(self.ids[found] == items, found, -1)

    def title(self, item: int) -> str | None:
        """The item's title; None where it has none or is not here."""
        row = int(self.rows(np.array([item], np.int64))[0])
        return None if self.titles is None or row < 0 else self.titles[row]

    def save(self, path: str | Path) -> None:
        """Write the catalogue to `path`, one safetensors file, whole or not at all."""
        tensors: dict[str, npt.NDArray[Any]] = {"ids": self.ids, "embeddings": self.embeddings}
        if self.titles is not None:
            tensors["titles"] = np.frombuffer(json.dumps(self.titles).encode(), np.uint8)
        with replacing(Path(path)) as partial:
            save_file(tensors, partial, metadata={"format": _FORMAT})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The catalogue saved at `path`. InvalidInput if it is no such file; no pickled code is ever run."""
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        except (SafetensorError, OSError, TypeError, ValueError) as error:
            raise InvalidInput("path", f"{path} is not a readable safetensors file: {error}") from error
        if metadata.get("format") != _FORMAT:
            raise InvalidInput("path", f"{path} is not a RelayGR catalogue (format {metadata.get('format')!r})")
        missing = {"ids", "embeddings"} - tensors.keys()
        unknown = tensors.keys() - {"ids", "embeddings", "titles"}
        for name in sorted(missing | unknown):
            raise InvalidInput(
                name, f"is {'missing from' if name in missing else 'no part of a catalogue, but in'} {path}"
            )
        titles = None
        if "titles" in tensors:
            try:
                titles = json.loads(tensors["titles"].tobytes())
            except ValueError as error:
                raise InvalidInput("titles", f"of {path} are not JSON: {error}") from error
            if not isinstance(titles, list):
                raise InvalidInput("titles", f"of {path} are not a list")
        return cls(tensors["ids"], tensors["embeddings"], titles)


def _unit_rows(values: Any, rows: int) -> npt.NDArray[np.float32]:
    """`values` as read-only float32 [rows, d] whose rows have length 1; those that do already keep every bit."""
    try:
        array = np.array(values, np.float32, order="C")
    except (TypeError, ValueError) as error:
        raise InvalidInput("embeddings", f"is not an array of numbers: {error}") from error
    if array.ndim != 2 or len(array) != rows or not array.shape[1]:
        raise InvalidInput("embeddings", f"must be {rows} rows, not of shape {array.shape}")
    if not np.isfinite(array).all():
        raise InvalidInput("embeddings", "has values that are not finite")
    lengths = np.sqrt(np.einsum("nd,nd->n", array, array, dtype=np.float64))
    if not lengths.all():
        raise InvalidInput("embeddings", f"has only zeros in row {int(lengths.argmin())}")
    other = np.abs(lengths - 1) > _UNIT
    array[other] = array[other] / lengths[other, None]
    array.flags.writeable = False
    return array
