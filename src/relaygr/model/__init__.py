"""GR models: embeddings, stacks of layers, heads, checkpoints."""

from relaygr.model import checkpoint
from relaygr.model.batch import AppendBatch, AppendRow, ScoreBatch, ScoreRow
from relaygr.model.build import build_model
from relaygr.model.candidates import Candidates
from relaygr.model.config import ModelConfig
from relaygr.model.ranking import RankingModel

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
