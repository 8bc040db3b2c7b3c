"""What the executor asks of a GPU and how it lets go of it, as far as that needs none."""

import pytest
import torch

from paged import small_model
from relaygr.engine import torch_executor
from relaygr.engine.torch_executor import TorchExecutor

GPU = torch.device("cuda", 0)


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> int:
    """A device with this many bytes free, once torch has given back all that it holds unused."""
    free, held = 10**6, [10**6]
    monkeypatch.setattr(torch.cuda, "empty_cache", held.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free - sum(held), free))
    return free


def test_memory_that_torch_holds_unused_is_free(crowded: int) -> None:
    model = small_model("meta")
    weights = sum(each.numel() for each in model.parameters()) * 2
    assert torch_executor._free_bytes(GPU, model, torch.bfloat16) == crowded - weights


def test_a_table_stays_on_a_device_with_room_for_it(crowded: int) -> None:
    executor = TorchExecutor()
    executor._device = GPU
    assert not executor._table_on_host(small_model("meta"))
