"""How an append is best cut on a device: by what its kernel gives each multiprocessor."""

from typing import Any

import pytest
import torch

from optional import require
from relaygr.history import PAGE
from relaygr.kernels import PageLayout, ReferenceAttention, append_grain, select

require("triton", "pip install relaygr[triton]")

from relaygr.kernels import triton  # noqa: E402

DEVICE = torch.device("cuda")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "is_hopper", lambda device: True)
    monkeypatch.setattr(select, "multiprocessors", lambda device: 132)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "grain"),
    [
        (4, 128, torch.bfloat16, 4096),
        (4, 64, torch.float16, 4096),
        (8, 128, torch.bfloat16, 2048),
        (2, 64, torch.bfloat16, 8192),
        (200, 64, torch.bfloat16, PAGE),
        (4, 128, torch.float32, PAGE),  # another kernel's
        (4, 48, torch.bfloat16, PAGE),
    ],
)
def test_a_page_of_a_head_for_every_multiprocessor(heads: int, head_dim: int, dtype: torch.dtype, grain: int) -> None:
    layout = PageLayout(8, heads, head_dim, dtype)
    assert append_grain(triton.TritonAttention(), layout, DEVICE) == grain
    assert append_grain(ReferenceAttention(), layout, DEVICE) == PAGE


@pytest.mark.usefixtures("hopper")
def test_of_a_kernel_that_is_not_ours_nothing_is_known() -> None:
    other: Any = object()
    assert append_grain(other, PageLayout(8, 4, 128, torch.bfloat16), DEVICE) == PAGE


def test_other_devices_have_no_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "is_hopper", lambda device: False)
    assert append_grain(triton.TritonAttention(), PageLayout(8, 4, 128, torch.bfloat16), DEVICE) == PAGE
