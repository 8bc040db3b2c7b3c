"""Replays take the letters in the order they were posted: each its own inputs, each its own recipient."""

from typing import Final

import pytest
import torch

from optional import require
from relaygr.kernels.layer import Norm
from relaygr.kernels.mail import INPUTS, LETTERS, SCORES, Mail, fetch

require("triton", "pip install relaygr[triton]")

from relaygr.kernels import ends_triton  # noqa: E402

DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"


def _host(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, pin_memory=DEVICE == "cuda")


@pytest.mark.parametrize("words", [8, 1024, 3000, 40_000])
def test_every_launch_fetches_what_its_own_letter_names(words: int) -> None:
    mail, inputs = Mail.make(DEVICE), torch.zeros(words, dtype=torch.int32, device=DEVICE)
    sources = [_host(words, dtype=torch.int32) for _ in range(3)]
    for number, source in enumerate(sources):
        source.copy_(torch.arange(words) * 7 + number)
        mail.letters[number, INPUTS] = source.data_ptr()
    for source in sources:
        fetch(mail, inputs)
        assert torch.equal(inputs.cpu(), source)


def test_letters_are_used_again_when_all_were_taken() -> None:
    mail, inputs = Mail.make(DEVICE), torch.zeros(4, dtype=torch.int32, device=DEVICE)
    sources = [torch.full_like(_host(4, dtype=torch.int32), number, pin_memory=DEVICE == "cuda") for number in range(3)]
    for number in range(LETTERS + 5):
        source = sources[number % 3]
        mail.letters[number % LETTERS, INPUTS] = source.data_ptr()
        fetch(mail, inputs)
        assert torch.equal(inputs.cpu(), source)


@pytest.mark.parametrize(("rows", "limit"), [(9, 9), (64, 10), (4, 0)])
def test_scores_go_to_the_recipient_of_each_launch_and_none_behind_the_last_row(rows: int, limit: int) -> None:
    draw, dim, tasks = torch.Generator().manual_seed(3), 32, 2
    x = torch.randn(rows, dim, generator=draw).half().to(DEVICE)
    scale, shift = (torch.randn(dim, generator=draw).half().to(DEVICE) for _ in range(2))
    norm = Norm(scale, shift, 1e-5)
    weight = torch.randn(dim, tasks, generator=draw).half().to(DEVICE)
    bias = torch.randn(tasks, generator=draw).half().to(DEVICE)
    expected = ends_triton.head(x, norm.weight, norm.bias, norm.eps, weight, bias).cpu()
    mail = Mail.make(DEVICE)
    outs = [_host(rows, tasks, dtype=torch.float32) for _ in range(3)]
    for number, out in enumerate(outs):
        mail.letters[number, SCORES] = out.data_ptr()
    here = torch.tensor([limit], dtype=torch.int32, device=DEVICE)
    inputs, nothing = torch.zeros(4, dtype=torch.int32, device=DEVICE), _host(4, dtype=torch.int32)
    mail.letters[:, INPUTS] = nothing.data_ptr()
    for number in range(3):
        fetch(mail, inputs)
        got = ends_triton.head(x, norm.weight, norm.bias, norm.eps, weight, bias, here, mail)
        assert got.shape == (0, tasks)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        for other, out in enumerate(outs):
            assert torch.equal(out[:limit], expected[:limit] if other <= number else torch.zeros(limit, tasks))
            assert not out[limit:].any()
