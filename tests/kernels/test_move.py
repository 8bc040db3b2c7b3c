"""Pages are moved between two pools, whole or a layer at a time, and nothing else is touched."""

from typing import Final

import pytest
import torch

from optional import require
from relaygr.kernels import PageLayout
from relaygr.kernels.move import move_pages, move_pages_plain

require("triton", "pip install relaygr[triton]")

from relaygr.kernels import move_triton  # noqa: E402

DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUT: Final = PageLayout(3, 1, 24, torch.float16)
"""A layer of a page is 1,536 words: less than a block moves at a time, and more than one for two layers."""


def _pools() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    pools = [torch.randn(LAYOUT.allocate(count).shape, generator=draw).half().to(DEVICE) for count in (9, 7)]
    return pools[0], pools[1]


@pytest.mark.parametrize(("first", "last"), [(0, 3), (0, 1), (1, 2), (1, 3)])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_the_layers_asked_for_arrive_and_nothing_else_changes(count: int, first: int, last: int) -> None:
    source, target = _pools()
    old = torch.tensor([8, 0, 3, 5, 1][:count], dtype=torch.int32, device=DEVICE)
    new = torch.tensor([2, 6, 0, 1, 5][:count], dtype=torch.int32, device=DEVICE)
    before, expected = source.clone(), target.clone()
    expected[new.long(), first:last] = source[old.long(), first:last]
    plain = target.clone()
    move_pages_plain(source, plain, old, new, first, last)
    move_triton.move_pages(source, target, old, new, first, last)
    assert torch.equal(plain, expected)
    assert torch.equal(target, expected)
    assert torch.equal(source, before)


def test_layer_by_layer_is_the_whole() -> None:
    source, target = _pools()
    whole, old, new = target.clone(), torch.tensor([4, 2], dtype=torch.int32), torch.tensor([3, 1], dtype=torch.int32)
    old, new = old.to(DEVICE), new.to(DEVICE)
    move_pages(source, whole, old, new, 0, 3)
    for layer in range(3):
        move_triton.move_pages(source, target, old, new, layer, layer + 1)
    assert torch.equal(target, whole)
