"""What a model is trained for, at every position of its windows."""

import torch
import torch.nn.functional as F

from relaygr.model import RankingModel
from relaygr.train.forward import forward, normed, scores_of
from relaygr.train.recipe import Objective
from relaygr.train.sequences import Batch, Sequences

__all__ = ["item_vectors", "losses", "query_vectors"]


def query_vectors(model: RankingModel, history: torch.Tensor) -> torch.Tensor:
    """What history rows behind the last layer look for, of length 1 and float32."""
    return F.normalize(normed(model, history).float(), dim=-1)


def item_vectors(model: RankingModel) -> torch.Tensor:
    """The items' embeddings, of length 1, [items, dim]: a query's best items are those nearest to it."""
    return F.normalize(model.embedding.table[: model.config.items].float(), dim=-1)


def losses(
    model: RankingModel, sequences: Sequences, batch: Batch, objective: Objective, dropout: float
) -> dict[str, torch.Tensor]:
    """The loss of each objective, a mean over positions, before its weight."""
    candidates = sees = None
    if objective.ranking:
        sees = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand(batch.valid.shape)
        candidates = sequences.candidates(batch.tokens[..., 0], sees)
    outputs = forward(model, batch.tokens, candidates, sees, dropout=dropout)
    found = {}
    if objective.next_item:
        found["next_item"] = _next_item(model, outputs.history, batch, objective)
    if outputs.candidates is not None:
        found["ranking"] = _ranking(model, outputs.candidates, sequences.labels[batch.rows], batch.valid)
    return found


def _next_item(model: RankingModel, history: torch.Tensor, batch: Batch, objective: Objective) -> torch.Tensor:
    """Cross-entropy of the next behaviour's item against all items, or against those drawn and itself."""
    followed = batch.valid[:, 1:]
    with torch.autocast(history.device.type, enabled=False):
        queries = query_vectors(model, history[:, :-1][followed])
        targets = batch.tokens[:, 1:, 0][followed]
        items = item_vectors(model)
        if not objective.negatives:
            return F.cross_entropy(queries / objective.temperature @ items.T, targets)
        drawn = torch.randint(len(items), (objective.negatives,), device=items.device)
        positive = (queries * items[targets]).sum(-1, keepdim=True)
        negative = (queries @ items[drawn].T).masked_fill(drawn == targets[:, None], -torch.inf)
        logits = torch.cat((positive, negative), dim=-1) / objective.temperature
        return F.cross_entropy(logits, torch.zeros_like(targets))


def _ranking(model: RankingModel, candidates: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy of every label that is known, a mean over them all."""
    scores = scores_of(model, candidates).float()
    known = (labels >= 0) & valid[..., None]
    loss = F.binary_cross_entropy_with_logits(scores, labels.clamp(min=0), reduction="none")
    return (loss * known).sum() / known.sum().clamp(min=1)
