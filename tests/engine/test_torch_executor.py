"""What the executor asks of a GPU and how it lets go of it, as far as that needs none."""

from typing import Any

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


def test_host_pages_are_given_back_where_a_runner_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Pinned:
        def __init__(self, *_: Any) -> None:
            self.pages = torch.empty(0)

        def close(self) -> None:
            closed.append(self)

    class NoRunner:
        def __init__(self, *_: Any, canary: bool) -> None:
            raise RuntimeError("out of memory")

    monkeypatch.setattr("relaygr.engine.pinned.PinnedPages", Pinned)
    monkeypatch.setattr("relaygr.engine.cuda_runner.CudaRunner", NoRunner)
    executor, layout = TorchExecutor(), small_model("meta").layout
    with pytest.raises(RuntimeError, match="out of memory"):
        executor._open_gpu(layout, layout.allocate(1), 4, 1, canary=False)
    assert len(closed) == 1
    assert executor.host_pages == 0
