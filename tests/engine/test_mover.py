"""Pages are moved by address: the layers asked for, to where they belong, and nothing else."""

import ctypes

import numpy as np
import pytest
import torch

from relaygr.engine import mover
from relaygr.engine.driver import Addresses
from relaygr.engine.mover import PageMover, layer_cuts
from relaygr.engine.step import Direction, PageCopy
from relaygr.kernels import PageLayout

LAYOUT = PageLayout(5, 2, 8, torch.float16)


def by_hand(sources: Addresses, targets: Addresses, size: int, stream: object) -> None:
    assert len(sources), "the driver takes no empty batch"
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        ctypes.memmove(target, source, size)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor]:
    monkeypatch.setattr(mover, "can_copy_many", lambda: True)
    monkeypatch.setattr(mover, "copy_many", by_hand)
    draw = torch.Generator().manual_seed(0)
    device, host = (torch.randn(LAYOUT.allocate(count).shape, generator=draw).half() for count in (9, 7))
    return device, host


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 8, 24])
def test_layers_come_in_parts_that_halve_and_end_with_a_single_one(layers: int) -> None:
    cuts = layer_cuts(layers)
    assert [layer for first, last in cuts for layer in range(first, last)] == list(range(layers))
    assert cuts[-1] == (layers - 1, layers)
    assert len(cuts) <= layers.bit_length() + 1


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(("first", "last"), [(0, 5), (0, 1), (2, 4)])
def test_the_layers_asked_for_arrive_and_nothing_else_changes(
    pools: tuple[torch.Tensor, torch.Tensor], direction: Direction, first: int, last: int
) -> None:
    device, host = pools
    source, target = (host, device) if direction is Direction.IN else (device, host)
    old, new = np.array([6, 0, 3]), np.array([2, 5, 1])
    before, expected = source.clone(), target.clone()
    expected[torch.from_numpy(new), first:last] = source[torch.from_numpy(old), first:last]
    PageMover(device, host).move(PageCopy(direction, old, new), first, last, object())  # type: ignore[arg-type]
    assert torch.equal(target, expected)
    assert torch.equal(source, before)


def test_no_pages_are_no_copy(pools: tuple[torch.Tensor, torch.Tensor]) -> None:
    device, host = pools
    before, none = host.clone(), np.empty(0, np.int64)
    PageMover(device, host).move(PageCopy(Direction.OUT, none, none), 0, 5, object())  # type: ignore[arg-type]
    assert torch.equal(host, before)
