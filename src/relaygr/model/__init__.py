"""GR models: embeddings, stacks of layers, heads, checkpoints."""

from typing import TYPE_CHECKING

from relaygr.lazy import lazily
from relaygr.model.candidates import Candidates
from relaygr.model.config import ModelConfig

if TYPE_CHECKING:
    from relaygr.model import checkpoint
    from relaygr.model.batch import AppendBatch, AppendRow, ScoreBatch, ScoreRow
    from relaygr.model.build import build_model
    from relaygr.model.ranking import RankingModel
else:
    __getattr__ = lazily(
        __name__,
        {
            "AppendBatch": "relaygr.model.batch",
            "AppendRow": "relaygr.model.batch",
            "RankingModel": "relaygr.model.ranking",
            "ScoreBatch": "relaygr.model.batch",
            "ScoreRow": "relaygr.model.batch",
            "build_model": "relaygr.model.build",
        },
    )

__all__ = [
    "AppendBatch",
    "AppendRow",
    "Candidates",
    "ModelConfig",
    "RankingModel",
    "ScoreBatch",
    "ScoreRow",
    "build_model",
    "checkpoint",
]
