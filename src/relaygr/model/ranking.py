"""A ranking model: embeddings, a stack of layers, and a head with a score per task."""

import hashlib
import json

import torch
from torch import nn

from relaygr.errors import InvalidInput
from relaygr.kernels import PageLayout
from relaygr.kernels.ends import head
from relaygr.kernels.layer import Norm
from relaygr.kernels.mail import Mail
from relaygr.model.batch import AppendBatch, ScoreBatch
from relaygr.model.config import ModelConfig
from relaygr.model.embedding import TokenEmbedding
from relaygr.model.hstu import HstuStack
from relaygr.model.inputs import ModelInputs
from relaygr.model.softmax import SoftmaxStack
from relaygr.model.stack import BeforeLayer, Stack
from relaygr.model.tokens import table_rows

__all__ = ["EPOCH_TABLES", "RankingModel"]

EPOCH_TABLES = frozenset({"embedding.table"})
"""The tables that production refreshes often: their epoch is counted, not digested."""


class RankingModel(ModelInputs, nn.Module):
    """Runs history with `append` and candidates with `score`; full inference is the one, then the other.

    `epoch` numbers the item and context tables: whoever changes them raises it. A model that is being served
    must not be changed: make another and swap it in.
    """

    def __init__(self, config: ModelConfig, *, epoch: int = 0) -> None:
        super().__init__()
        if table_rows(config) >= 2**31:
            raise InvalidInput("items", f"and contexts together must be below {2**31}, the rows that tokens can name")
        self.config = config
        self.epoch = epoch
        self.embedding = TokenEmbedding(config)
        self.stack: Stack = (
            HstuStack.from_config(config) if config.family == "hstu" else SoftmaxStack.from_config(config)
        )
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
    def score(
        self, batch: ScoreBatch, pages: torch.Tensor, before: BeforeLayer | None = None, mail: Mail | None = None
    ) -> torch.Tensor:
        """Run candidates against pages, writing nothing. Scores are logits: float32 [rows, tasks].

        `mail`: where they go instead, where this is captured.
        """
        x = self.embedding.candidates(batch.items, batch.positions, batch.ragged, batch.dense)
        x = self.stack.score(x, pages, batch.ragged, before)
        norm = Norm(self.norm_weight, self.norm_bias, self.config.norm_eps)
        return head(x, norm, self.head_weight, self.head_bias, batch.ragged.limit, mail)

    def version(self) -> str:
        """The digest of the config and of every weight but the epoch's tables. Reads all of them: keep the result."""
        digest = hashlib.sha256(json.dumps(self.config.to_dict(), sort_keys=True).encode())
        for name, tensor in sorted(self.state_dict().items()):
            if name not in EPOCH_TABLES:
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()[:32]
