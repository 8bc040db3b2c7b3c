"""Pages are moved by address: the layers asked for, to where they belong, and nothing else."""

import ctypes
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relaygr.engine import mover
from relaygr.engine.driver import Addresses, Sizes
from relaygr.engine.mover import PageMover, layer_cuts, runs
from relaygr.engine.step import Direction, PageCopy
from relaygr.kernels import PageLayout

LAYOUT = PageLayout(5, 2, 8, torch.float16)


def by_hand(sources: Addresses, targets: Addresses, sizes: Sizes, stream: object) -> None:
    assert len(sources), "the driver takes no empty batch"
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
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
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([6, 0, 3], [2, 5, 1]),
        ([2, 3, 4, 5, 6], [1, 2, 3, 4, 5]),
        ([6, 5, 4, 1], [3, 2, 1, 0]),
        ([1, 2, 3], [3, 2, 1]),
    ],
    ids=["scattered", "up", "down", "against"],
)
def test_the_layers_asked_for_arrive_and_nothing_else_changes(
    pools: tuple[torch.Tensor, torch.Tensor],
    direction: Direction,
    first: int,
    last: int,
    old: list[int],
    new: list[int],
) -> None:
    device, host = pools
    source, target = (host, device) if direction is Direction.IN else (device, host)
    before, expected = source.clone(), target.clone()
    expected[new, first:last] = source[old, first:last]
    copy = PageCopy(direction, np.array(old), np.array(new))
    PageMover(device, host, 3).move(copy, first, last, object())  # type: ignore[arg-type]
    assert torch.equal(target, expected)
    assert torch.equal(source, before)


def test_no_pages_are_no_copy(pools: tuple[torch.Tensor, torch.Tensor]) -> None:
    device, host = pools
    before, none = host.clone(), np.empty(0, np.int64)
    PageMover(device, host, 3).move(PageCopy(Direction.OUT, none, none), 0, 5, object())  # type: ignore[arg-type]
    assert torch.equal(host, before)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from((-1, 1)), st.sampled_from((-1, 1))), min_size=1, max_size=8),
    st.integers(1, 7),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_runs_are_the_same_pages_each_once_and_within_what_was_pinned(
    parts: list[tuple[int, int, int]], pinned: int, turned: bool, random: Random
) -> None:
    """Of stretches of pages that lie somewhere in either tier, up or down."""
    sides: list[list[int]] = []
    for side in (1, 2):
        at, stretches = 0, []
        for part in parts:
            stretches.append(list(range(at, at + part[0]))[:: part[side]])
            at += part[0] + random.randrange(2)
        sides.append([page for stretch in stretches for page in stretch])
    device, host = (np.array(side[::-1] if turned else side) for side in sides)
    ours, theirs, counts = runs(device, host, pinned)
    pairs = {
        (int(a) + k, int(b) + k) for a, b, count in zip(ours, theirs, counts, strict=True) for k in range(int(count))
    }
    assert pairs == set(zip(device.tolist(), host.tolist(), strict=True))
    assert counts.sum() == len(device)
    assert (theirs // pinned == (theirs + counts - 1) // pinned).all()


def test_a_prefix_that_lies_in_one_piece_is_one_copy() -> None:
    ours, theirs, counts = runs(np.arange(40, 20, -1), np.arange(99, 79, -1), 100)
    assert (ours.tolist(), theirs.tolist(), counts.tolist()) == ([21], [80], [20])
