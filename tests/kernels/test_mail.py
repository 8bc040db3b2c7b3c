"""Replays take the letters in the order they were posted: each its own inputs, each its own recipient."""

from typing import Final

import numpy as np
import pytest
import torch

from optional import require
from relaygr import Candidates, build_model
from relaygr.engine.buckets import Bucket
from relaygr.engine.mailbox import Mailbox
from relaygr.engine.trays import Trays
from relaygr.history import PAGE
from relaygr.kernels.layer import Norm
from relaygr.kernels.mail import INPUTS, LETTERS, SCORES, Inputs, Mail, collect, fetch
from relaygr.model import ScoreBatch
from relaygr.model.batch import ScoreRow
from relaygr.model.packed import Packed

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


@pytest.mark.parametrize(("request_features", "features"), [(0, 0), (2, 3), (0, 1)])
@pytest.mark.parametrize("bucket", [Bucket(1, 128), Bucket(4, 512), Bucket(2, 2048), Bucket(32, 128)])
@pytest.mark.parametrize("longest", [1, 7, 8])
def test_scores_are_collected_from_the_trays_that_their_letter_names(
    bucket: Bucket, request_features: int, features: int, longest: int
) -> None:
    """As if they had been packed for this launch, whatever an earlier one has left."""
    model = build_model(
        "hstu", layers=1, dim=8, heads=1, items=900, seed=0, scale_length=1.0,
        request_features=request_features, candidate_features=features,
    )  # fmt: skip
    config, draw, trays = model.config, np.random.default_rng(longest), Trays(model.config, longest)
    wide = request_features + features
    box, inputs = Mailbox(torch.device(DEVICE), bucket.users), Packed.empty(bucket.shape(longest, wide), device=DEVICE)
    where = Inputs(inputs.starts, inputs.cached, inputs.positions, inputs.table, inputs.items, inputs.dense)
    for users in (bucket.users, -(-bucket.users // 2), 0):
        rows = []
        for _ in range(users):
            count, tokens = int(draw.integers(1, bucket.rows + 1)), int(draw.integers(0, longest * PAGE + 1))
            given = draw.normal(size=(count, features)) if features and draw.random() < 0.7 else None
            asked = draw.normal(size=request_features).astype(np.float32) if draw.random() < 0.7 else None
            candidates = Candidates(draw.integers(0, 900 if draw.random() < 0.5 else 2**40, count), given)
            pages = draw.integers(0, 5000, -(-tokens // PAGE))
            rows.append(trays.now(ScoreRow(candidates, asked, tokens // 2, tokens, pages)))
        counts = [len(row.candidates) for row in rows]
        box.post_scores([row.laid.tray.address for row in rows if row.laid is not None], counts, 4242)
        collect(box.mail, where)
        assert int(inputs.starts[-1]) == sum(counts)
        assert int(box.mail.state[2]) == 4242
        if not rows:
            assert not inputs.starts.any()
            assert not inputs.cached.any()
            continue
        packed = Packed.empty(bucket.shape(longest, wide))
        total = ScoreBatch.fill(packed, config, rows)
        ends = {"starts": None, "cached": None, "positions": None, "table": users, "items": total, "dense": total}
        for name, until in ends.items():
            here, there = getattr(inputs, name), getattr(packed, name)
            assert (here is None) == (there is None)
            assert here is None or torch.equal(here[:until].cpu(), there[:until]), name
