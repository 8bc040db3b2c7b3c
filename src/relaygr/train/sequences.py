"""A data set's tokens on one device, and the batches cut from them there."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from relaygr.errors import InvalidInput
from relaygr.history import History
from relaygr.model import ModelConfig
from relaygr.model.tokens import candidate_tokens, history_tokens
from relaygr.train.dataset import Dataset

__all__ = ["Batch", "Sequences", "device_of"]

_NO_CONTEXT: npt.NDArray[np.int64] = np.empty(0, np.int64)


def device_of(name: torch.device | str) -> torch.device:
    """The device of that name; InvalidInput where there is none."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidInput("device", f"is {str(name)!r}; write cpu, cuda, cuda:1 …") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidInput("device", f"is {str(name)!r}, and this machine has {torch.cuda.device_count()} such GPUs")
    return device


class Batch(NamedTuple):
    """Windows over histories, padded on the right to the longest."""

    tokens: torch.Tensor
    """[b, n, 4]"""
    rows: torch.Tensor
    """[b, n]: where each token stands in the data set; a padded one stands anywhere."""
    valid: torch.Tensor
    """[b, n]"""
    lengths: torch.Tensor
    """[b]"""


class Sequences:
    """Tokens of every behaviour, as serving makes them; a window's first behaviour has gap 0 and position 0."""

    def __init__(self, dataset: Dataset, config: ModelConfig, longest: int, device: torch.device | str = "cpu") -> None:
        whole = History(dataset.items, dataset.actions, np.zeros(len(dataset), np.int64))
        tokens = history_tokens(config, whole, _NO_CONTEXT, 0, len(whole))
        for user in range(dataset.users):  # gaps restart with every user
            low, high = dataset.offsets[user], dataset.offsets[user + 1]
            tokens[low:high, 2] = history_tokens(config, dataset.history(user), _NO_CONTEXT, 0, int(high - low))[:, 2]
        clock = History(
            np.zeros(longest + 1, np.int64), np.zeros(longest + 1, np.int32), np.zeros(longest + 1, np.int64)
        )
        places = history_tokens(config, clock, _NO_CONTEXT, 0, longest + 1)
        marker = candidate_tokens(config, np.zeros(1, np.int64), 0)[0]
        self.items = config.items
        self.tokens = torch.from_numpy(tokens[:, :3].copy()).to(device)
        self.labels = torch.from_numpy(dataset.labels.astype(np.float32)).to(device)
        self.first_gap = int(places[0, 2])
        self.positions = torch.from_numpy(places[:, 3].copy()).to(device)
        self.marker_kind, self.marker_gap = int(marker[1]), int(marker[2])

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    def windows(self, starts: torch.Tensor, lengths: torch.Tensor, longest: int) -> Batch:
        """Behaviours starts … starts + lengths [b], rows of the data set; `longest` is the most of the lengths."""
        place = torch.arange(longest, device=self.device)
        valid = place < lengths[:, None]
        rows = (starts[:, None] + place).clamp(max=len(self.tokens) - 1)
        gathered = self.tokens[rows]
        gathered[:, 0, 2] = self.first_gap
        positions = self.positions[:longest].expand(len(starts), -1)[..., None]
        return Batch(torch.cat((gathered, positions), dim=-1), rows, valid, lengths)

    def candidates(self, items: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Tokens [b, m, 4] of items [b, m] as candidates that stand at positions [b, m]."""
        tokens = items.new_empty(*items.shape, 4)
        tokens[..., 0] = items
        tokens[..., 1] = self.marker_kind
        tokens[..., 2] = self.marker_gap
        tokens[..., 3] = self.positions[positions]
        return tokens
