"""The items to score for one request."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from relaygr.errors import InvalidInput
from relaygr.history.history import integers

__all__ = ["Candidates", "Items", "features_of"]

_HIGHEST: Final = 2**63 - 1
_NARROW: Final = 2**31 - 1
"""The highest that 32 bits hold."""


Items = npt.NDArray[np.int32] | npt.NDArray[np.int64]


class Candidates:
    """Items, int64 [m], and optionally their dense cross features, float32 [m, f].

    Raises InvalidInput naming the field for other shapes or dtypes, negative ids, and features that are not finite.
    """

    __slots__ = ("features", "highest", "kept")

    def __init__(self, items: Any, features: Any = None) -> None:
        own = integers("candidates", items, np.int64).copy()  # the caller may write to theirs, even now
        if not len(own):
            raise InvalidInput("candidates", "must not be empty")
        unsigned = own.view(np.uint64)
        self.highest: int = unsigned.item(unsigned.argmax())  # a third of the time that `max` takes
        """Of the items: known here, so that whoever batches them need not look."""
        if self.highest > _HIGHEST:  # as unsigned ones, negative numbers are the highest
            at = int(own.argmin())
            raise InvalidInput("candidates", f"must not be negative; entry {at} is {own[at]}")
        self.kept: Items = own if self.highest > _NARROW else own.astype(np.int32)
        """The items: int32, as batches have them, unless one is too high for that."""
        self.features: npt.NDArray[np.float32] | None = None
        if features is not None:
            self.features = features_of("features", features, dimensions=2)
            if len(self.features) != len(self.kept):
                raise InvalidInput("features", f"has {len(self.features)} rows for {len(self.kept)} candidates")

    @property
    def items(self) -> npt.NDArray[np.int64]:
        """Not to be written to. Converted at each call where they are kept as int32."""
        items = self.kept.astype(np.int64, copy=False)[:]
        items.flags.writeable = False
        return items

    def __len__(self) -> int:
        return len(self.kept)


def features_of(field: str, values: Any, *, dimensions: int) -> npt.NDArray[np.float32]:
    """`values` as finite float32 of that many dimensions; InvalidInput naming `field` otherwise."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise InvalidInput(field, f"is not an array of numbers: {error}") from error
    if array.ndim != dimensions:
        raise InvalidInput(field, f"must have {dimensions} dimensions, not shape {array.shape}")
    if array.dtype.kind not in "fiu":
        raise InvalidInput(field, f"must hold numbers, not {array.dtype}")
    if array.dtype == np.float32:
        array = array.copy()
    else:
        with np.errstate(over="ignore"):  # too large for float32: infinite, and refused as such
            array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise InvalidInput(field, "has values that are not finite")
    return array
