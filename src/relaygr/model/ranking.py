"""A ranking model: embeddings, a stack of layers, and a head with a score per task."""

import hashlib
import json
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from relaygr.errors import InvalidInput
from relaygr.history import History
from relaygr.history.history import integers
from relaygr.kernels import PageLayout
from relaygr.model.batch import NO_CONTEXT, AppendBatch, ScoreBatch
from relaygr.model.candidates import Candidates, features_of
from relaygr.model.config import MAX_CONTEXT, ModelConfig
from relaygr.model.embedding import TokenEmbedding
from relaygr.model.hstu import HstuStack
from relaygr.model.softmax import SoftmaxStack

__all__ = ["EPOCH_TABLES", "RankingModel"]

EPOCH_TABLES = frozenset({"embedding.table"})
"""The tables that production refreshes often: their epoch is counted, not digested."""


class RankingModel(nn.Module):
    """Runs history with `append` and candidates with `score`; full inference is the one, then the other.

    `epoch` numbers the item and context tables: whoever changes them raises it. A model that is being served
    must not be changed: make another and swap it in.
    """

    def __init__(self, config: ModelConfig, *, epoch: int = 0) -> None:
        super().__init__()
        self.config = config
        self.epoch = epoch
        self.embedding = TokenEmbedding(config)
        self.stack = HstuStack.from_config(config) if config.family == "hstu" else SoftmaxStack.from_config(config)
        self.norm_weight = nn.Parameter(torch.ones(config.dim))
        self.norm_bias = nn.Parameter(torch.zeros(config.dim))
        self.head_weight = nn.Parameter(torch.empty(config.dim, config.tasks))
        self.head_bias = nn.Parameter(torch.zeros(config.tasks))

    @property
    def layout(self) -> PageLayout:
        """The pages this model reads and writes."""
        return self.stack.layout()

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    @torch.inference_mode()
    def append(self, batch: AppendBatch, pages: torch.Tensor) -> None:
        """Run new history tokens, writing their KV into their pages and nothing else."""
        self.stack.append(self.embedding(batch.tokens), pages, batch.ragged)

    @torch.inference_mode()
    def score(self, batch: ScoreBatch, pages: torch.Tensor) -> torch.Tensor:
        """Run candidates against pages, writing nothing. Scores are logits: float32 [rows, tasks]."""
        x = self.stack.score(self.embedding(batch.tokens, batch.dense), pages, batch.ragged)
        x = F.layer_norm(x, x.shape[-1:], self.norm_weight, self.norm_bias, self.config.norm_eps)
        return torch.addmm(self.head_bias, x, self.head_weight).float()

    def version(self) -> str:
        """The digest of the config and of every weight but the epoch's tables. Reads all of them: keep the result."""
        digest = hashlib.sha256(json.dumps(self.config.to_dict(), sort_keys=True).encode())
        for name, tensor in sorted(self.state_dict().items()):
            if name not in EPOCH_TABLES:
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()[:32]

    def check_history(self, history: Any) -> History:
        """The history, if this model can read it; InvalidInput otherwise."""
        if not isinstance(history, History):
            raise InvalidInput("history", f"must be a relaygr.History, not {type(history).__name__}")
        if len(history) and int(history.actions.max()) >= self.config.actions:
            raise InvalidInput("actions", f"must be below {self.config.actions}, this model's number of actions")
        return history

    def check_context(self, context: Any) -> npt.NDArray[np.int64]:
        """The context as ids; InvalidInput if this model cannot read it."""
        if context is None:
            return NO_CONTEXT
        ids = integers("context", context, np.int64)
        if len(ids) > MAX_CONTEXT:
            raise InvalidInput("context", f"has {len(ids)} ids; {MAX_CONTEXT} are allowed")
        if ids.size and ids.min() < 0:
            raise InvalidInput("context", "must not be negative")
        return ids

    def check_candidates(self, candidates: Any) -> Candidates:
        """The candidates, as Candidates; InvalidInput if this model cannot read them."""
        checked = candidates if isinstance(candidates, Candidates) else Candidates(candidates)
        if checked.features is not None and checked.features.shape[1] != self.config.candidate_features:
            width = checked.features.shape[1]
            raise InvalidInput("features", f"has {width} columns; this model reads {self.config.candidate_features}")
        return checked

    def check_request(self, request: Any) -> npt.NDArray[np.float32] | None:
        """The request's features; InvalidInput if this model cannot read them."""
        if request is None:
            return None
        checked = features_of("request", request, dimensions=1)
        if len(checked) != self.config.request_features:
            raise InvalidInput(
                "request", f"has {len(checked)} numbers; this model reads {self.config.request_features}"
            )
        return checked
