"""A table too large for the device lies in pinned host memory; the device holds copies of the rows in demand."""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from relaygr.kernels.ends import HotRows

__all__ = ["HotRowCache"]

_PER_STEP: Final = 512
"""Rows that come in before one step at most: more would make it wait."""
_MOST_SEEN: Final = 255


class HotRowCache:
    """Copies of rows that were asked for more than once, in slots that are given on like the hands of a clock go round.

    A row is read from its slot or from the table, whichever the device finds in the map when it runs, so a row that is
    not here costs time and nothing else. Changes are made on the stream of the steps, between them.
    """

    def __init__(self, table: torch.Tensor, slots: int, device: torch.device) -> None:
        """`table`: [rows, dim] in host memory, pinned where the device is a GPU."""
        self.rows = HotRows(
            torch.zeros((slots, table.shape[1]), dtype=table.dtype, device=device),
            torch.full((len(table),), -1, dtype=torch.int32, device=device),
        )
        self._table = table
        self._device = device
        self._slot_of = np.full(len(table), -1, np.int32)
        self._owner = np.full(slots, -1, np.int64)
        self._seen = np.zeros(len(table), np.uint8)
        """How often each row was asked for of late."""
        self._hand = 0

    def observe(self, ids: npt.NDArray[np.integer]) -> None:
        """The next step reads these rows. Call it on the stream of the steps."""
        seen = self._seen[ids]
        self._seen[ids] = np.minimum(seen, _MOST_SEEN - 1) + 1
        wanted = np.unique(ids[(seen > 0) & (self._slot_of[ids] < 0)])[:_PER_STEP].astype(np.int64)
        if len(wanted):
            self._bring(wanted, self._free_slots(len(wanted)))

    def _free_slots(self, count: int) -> npt.NDArray[np.int64]:
        """Up to `count` slots whose rows are in less demand; the others are passed over, once."""
        window = np.unique((self._hand + np.arange(2 * count)) % len(self._owner))
        self._hand = (self._hand + 2 * count) % len(self._owner)
        owners = self._owner[window]
        busy = (owners >= 0) & (self._seen[owners] > 1)
        self._seen[owners[busy]] //= 2
        return window[~busy][:count]

    def _bring(self, wanted: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]) -> None:
        wanted = wanted[: len(slots)]
        slots = slots[: len(wanted)]
        gone = self._owner[slots]
        gone = gone[gone >= 0]
        values = self._table[torch.from_numpy(wanted)]
        self.rows.slots[self._send(gone)] = -1
        self.rows.rows[self._send(slots)] = self._send(values)
        self.rows.slots[self._send(wanted)] = self._send(slots.astype(np.int32))
        # Last: after a failure above, what was unmapped is read from the table, and what was not is unmapped again.
        self._slot_of[gone] = -1
        self._slot_of[wanted] = slots
        self._owner[slots] = wanted

    def _send(self, values: npt.NDArray[np.integer] | torch.Tensor) -> torch.Tensor:
        tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(values)
        if self._device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)
