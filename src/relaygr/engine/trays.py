"""Trays in pinned memory, for what ranks score on: taken when a rank comes, free when nobody holds it any more."""

import logging

import torch

from relaygr.engine.buckets import SCORE_BUCKETS
from relaygr.model.batch import ScoreRow, listed
from relaygr.model.config import ModelConfig
from relaygr.model.tray import Laid, Tray

__all__ = ["Trays"]

_log = logging.getLogger(__name__)

_ROWS = tuple(sorted({bucket.rows for bucket in SCORE_BUCKETS}))
_TOGETHER = 32
"""Trays that are pinned at once: each time takes about as long."""


class Trays:
    """Of one model, in a few sizes. Pinned when none is free, and kept."""

    def __init__(self, config: ModelConfig, longest: int) -> None:
        """`longest`: pages of a user at most."""
        self._config = config
        self._longest = longest
        self._free: list[tuple[int, list[Tray]]] = [(rows, []) for rows in _ROWS]

    def lay(self, row: ScoreRow) -> ScoreRow:
        """The same row, laid out; as it is where it has more candidates than a captured launch takes, or where there is
        no more memory to pin."""
        candidates, request, position, tokens, pages, told, _ = row
        count = len(candidates.kept)
        for rows, free in self._free:
            if count > rows:
                continue
            if not free:
                try:
                    free += self._pin(rows)
                except RuntimeError as error:
                    _log.warning("no memory could be pinned for what ranks score on: %s", error)
                    return row
            laid = Laid(free.pop(), free)
            if told is None:
                told = listed(pages)
            laid.tray.lay(self._config, candidates, request, position, tokens, told)
            return ScoreRow(candidates, request, position, tokens, pages, told, laid)
        return row

    def _pin(self, rows: int) -> list[Tray]:
        features = self._config.request_features + self._config.candidate_features
        words = Tray.words(self._longest, rows, features)
        memory = torch.zeros((_TOGETHER, words), dtype=torch.int32, pin_memory=torch.cuda.is_available())
        return [Tray(each, self._longest, rows, features) for each in memory]
