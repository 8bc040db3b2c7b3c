"""What a rank scores on is laid out once, and its tray is nobody else's for as long as somebody holds it."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relaygr import Candidates
from relaygr.engine.trays import _AHEAD_BYTES, _PATIENCE, Trays
from relaygr.history import PAGE
from relaygr.model import build_model
from relaygr.model.batch import ScoreRow, listed

CONFIG = build_model("hstu", layers=1, dim=8, heads=1, items=500, seed=0, scale_length=1.0).config


def ahead(trays: Trays, row: ScoreRow, most_bytes: float = _AHEAD_BYTES) -> ScoreRow:
    return trays.ahead(*row[:5], listed(row.pages), most_bytes)


def row(count: int, pages: int = 1, first: int = 0) -> ScoreRow:
    return ScoreRow(Candidates(np.arange(first, first + count)), None, 3, pages * PAGE, list(range(pages)))


@given(st.lists(st.tuples(st.sampled_from((1, 100, 128, 129, 2048)), st.integers(0, 40)), max_size=100))
def test_no_two_rows_that_are_held_lie_on_one_tray(rows: list[tuple[int, int]]) -> None:
    trays, held = Trays(CONFIG, 2), dict[int, tuple[ScoreRow, int]]()
    for number, (count, longer) in enumerate(rows):
        held = {each: kept for each, kept in held.items() if kept[1] > number}
        laid = ahead(trays, row(count, first=number % 300))
        held[number] = laid, number + longer
        addresses = set()
        for each, (kept, _) in held.items():
            assert kept.laid is not None
            addresses.add(kept.laid.tray.address)
            items = (np.arange(len(kept.candidates)) + each % 300).tolist()
            assert kept.candidates.items.tolist() == items
            below = [item for item in items if item < CONFIG.items]  # others are hashed
            assert kept.laid.tray.items[: len(below)].tolist() == below
        assert len(addresses) == len(held)


def test_trays_are_used_again() -> None:
    trays = Trays(CONFIG, 2)
    addresses = set()
    for _ in range(200):
        laid = ahead(trays, row(5)).laid
        assert laid is not None
        addresses.add(laid.tray.address)
        del laid
    assert len(addresses) == 1


def test_trays_are_let_go_of_with_their_model_though_nothing_is_collected() -> None:
    gc.collect()
    gc.disable()
    try:
        trays = Trays(CONFIG, 2)
        laid = ahead(trays, row(5)).laid
        assert laid is not None
        left = [weakref.ref(laid.tray), *(weakref.ref(tray) for _, free in trays._free for tray in free)]
        assert len(left) == 32
        del trays
        assert left[0]() is laid.tray
        del laid
        assert not any(each() for each in left)
    finally:
        gc.enable()


def test_addresses_are_aligned_whatever_the_sizes() -> None:
    for longest in range(1, 9):
        trays = Trays(CONFIG, longest)
        kept = [ahead(trays, row(count, longest)) for count in (1, 129, 700) * 20]
        assert all(each.laid is not None and each.laid.tray.address % 16 == 0 for each in kept)


def test_more_candidates_than_a_captured_launch_takes_are_not_laid_out() -> None:
    given_row = row(2049)
    assert ahead(Trays(CONFIG, 2), given_row).laid is None


def test_pages_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="take 12 bytes where there is room for 8"):
        Trays(CONFIG, 2).now(row(5, pages=3))


def test_without_memory_to_pin_rows_are_as_they_were_and_it_is_tried_again_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = 0

    def no_memory(*args: Any, **more: Any) -> None:
        nonlocal asked
        asked += 1
        raise RuntimeError("out of memory")

    trays, given_row = Trays(CONFIG, 2), row(5)
    monkeypatch.setattr(torch, "zeros", no_memory)
    for _ in range(5):
        assert ahead(trays, given_row).laid is trays.now(given_row).laid is None
    assert asked == 1
    assert caplog.text.count("out of memory") == 1
    monkeypatch.undo()
    assert any(ahead(trays, given_row).laid is not None for _ in range(_PATIENCE))


def test_ranks_that_wait_pin_no_more_than_their_share() -> None:
    trays = Trays(CONFIG, 2)
    waiting = [ahead(trays, row(2000), 1 << 20) for _ in range(200)]
    laid = [each for each in waiting if each.laid is not None]
    assert 0 < len(laid) < 128
    assert trays._bytes <= 1 << 20
    assert all(each.laid is None for each in waiting[len(laid) :])
    assert trays.now(waiting[-1]).laid is not None


@pytest.mark.parametrize("features", [0, 64])
def test_no_more_is_pinned_at_once_than_takes_a_moment(features: int) -> None:
    config = build_model(
        "hstu", layers=1, dim=8, heads=1, items=500, seed=0, scale_length=1.0, candidate_features=features
    ).config
    trays = Trays(config, 300)
    assert trays.now(row(2048)).laid is not None
    assert trays._bytes <= 2 << 20
