"""Trays in pinned memory, for what ranks score on: taken when a rank comes, free when nobody holds it any more."""

import logging
import math
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from relaygr.engine.buckets import SCORE_BUCKETS
from relaygr.kernels.ragged import PageList
from relaygr.model.batch import ScoreRow, listed
from relaygr.model.candidates import Candidates
from relaygr.model.config import ModelConfig
from relaygr.model.tray import Laid, Tray

__all__ = ["Trays"]

_log = logging.getLogger(__name__)

_ROWS: Final = tuple(sorted({bucket.rows for bucket in SCORE_BUCKETS}))
_TOGETHER: Final = 32
"""Trays that are pinned at once: each time takes about as long."""
_TOGETHER_BYTES: Final = 2 << 20
"""But no more than this: meanwhile nothing else is done."""
_AHEAD_BYTES: Final = 64 << 20
"""For ranks that wait. What is more is laid out when it is launched: some thousands of 2,048 candidates lie here."""
_PATIENCE: Final = 1000
"""How often none is asked for, once no memory could be pinned, before that is tried again."""


class Trays:
    """Of one model, in a few sizes. Pinned when none is free, and kept."""

    def __init__(self, config: ModelConfig, longest: int) -> None:
        """`longest`: pages of a user at most."""
        self._config = config
        self._longest = longest
        self._free: list[tuple[int, list[Tray]]] = [(rows, []) for rows in _ROWS]
        self._bytes = 0
        """Pinned by now."""
        self._refused = 0
        """How often none will be asked for yet."""

    def ahead(
        self,
        candidates: Candidates,
        request: npt.NDArray[np.float32] | None,
        position: int,
        tokens: int,
        pages: PageList,
        listed: bytes,
        most_bytes: float = _AHEAD_BYTES,
    ) -> ScoreRow:
        """A row of these, laid out as soon as it is known what a rank scores on; or not where it has more candidates
        than a captured launch takes, where more than so many bytes would be pinned, or where no more can be."""
        count, laid = len(candidates.kept), None
        for rows, free in self._free:
            if count <= rows:
                if free or self._pin(rows, free, most_bytes):
                    laid = Laid(tray := free.pop(), free)
                    tray.lay(self._config, candidates, request, position, tokens, listed)
                break
        return ScoreRow(candidates, request, position, tokens, pages, listed, laid)

    def now(self, row: ScoreRow) -> ScoreRow:
        """The row, laid out for a step about to be launched, however much waits; as it is where that cannot be."""
        candidates, request, position, tokens, pages, told, _ = row
        return self.ahead(
            candidates, request, position, tokens, pages, listed(pages) if told is None else told, math.inf
        )

    def _pin(self, rows: int, free: list[Tray], most_bytes: float) -> bool:
        """More trays for so many rows, among those that are free; False where that cannot be."""
        if self._refused:
            self._refused -= 1
            return False
        features = self._config.request_features + self._config.candidate_features
        words = Tray.words(self._longest, rows, features)
        count = max(1, min(_TOGETHER, _TOGETHER_BYTES // (4 * words)))
        if self._bytes + 4 * words * count > most_bytes:
            return False
        try:
            memory = torch.zeros((count, words), dtype=torch.int32, pin_memory=torch.cuda.is_available())
        except RuntimeError as error:
            _log.warning("no more memory can be pinned for what ranks score on: %s", error)
            self._refused = _PATIENCE
            return False
        self._bytes += 4 * words * count
        free += [Tray(each, self._longest, rows, features) for each in memory]
        return True
