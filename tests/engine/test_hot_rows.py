"""Rows in demand are copied to the device; whatever is there, a lookup finds the table's row."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr.engine.hot_rows import HotRowCache

CPU = torch.device("cpu")


def looked_up(cache: HotRowCache, table: torch.Tensor, ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> torch.Tensor:
    """As the device does it."""
    slots = cache.rows.slots[torch.from_numpy(ids)].long()
    held = cache.rows.rows[slots.clamp(min=0)]
    return torch.where((slots >= 0)[:, None], held, table[torch.from_numpy(ids)])


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 200))
def test_every_lookup_finds_the_row_of_the_table(seed: int, slots: int, rows: int) -> None:
    draw = np.random.default_rng(seed)
    table = torch.randn(rows, 4)
    cache = HotRowCache(table, slots, CPU)
    for _ in range(30):
        ids = np.minimum(draw.geometric(0.05, int(draw.integers(1, 60))) - 1, rows - 1)
        cache.observe(ids)
        assert torch.equal(looked_up(cache, table, ids), table[torch.from_numpy(ids)])
    held = cache.rows.slots[cache.rows.slots >= 0]
    assert len(set(held.tolist())) == len(held) <= slots


def test_a_row_comes_when_it_is_asked_for_again() -> None:
    cache = HotRowCache(torch.randn(100, 4), 10, CPU)
    cache.observe(np.arange(5))
    assert not (cache.rows.slots >= 0).any()
    cache.observe(np.array([3, 4, 50]))
    assert torch.nonzero(cache.rows.slots >= 0).flatten().tolist() == [3, 4]


def test_rows_in_demand_stay_while_others_pass() -> None:
    draw = np.random.default_rng(0)
    cache = HotRowCache(torch.randn(10_000, 4), 100, CPU)
    hot = np.arange(50)
    for _ in range(200):
        cache.observe(np.concatenate((hot, draw.integers(50, 10_000, 50))))
    assert int((cache.rows.slots[:50] >= 0).sum()) >= 45


def test_a_table_that_fits_is_all_here_in_the_end() -> None:
    cache = HotRowCache(torch.randn(64, 4), 64, CPU)
    for _ in range(5):
        cache.observe(np.arange(64))
    assert (cache.rows.slots >= 0).all()


@pytest.mark.parametrize("fails_at", range(5))
def test_a_transfer_that_fails_leaves_every_lookup_right(fails_at: int) -> None:
    table = torch.randn(40, 4)
    cache = HotRowCache(table, 4, CPU)
    everything = np.arange(40)
    for ids in ([1, 2, 3, 4], [1, 2, 3, 4]):
        cache.observe(np.array(ids))
    sent = [0]
    send = cache._send

    def failing(values: Any) -> torch.Tensor:
        sent[0] += 1
        if sent[0] == fails_at + 1:
            raise RuntimeError("out of memory")
        return send(values)

    cache._send = failing  # type: ignore[method-assign]
    cache._seen[:] = 0
    cache.observe(np.array([10, 11]))
    with pytest.raises(RuntimeError):
        cache.observe(np.array([10, 11]))
    assert torch.equal(looked_up(cache, table, everything), table)
    for ids in ([20, 21], [20, 21], [30, 31, 32], [30, 31, 32], [1, 2], [1, 2]):
        cache._seen[cache._owner[cache._owner >= 0]] = 0
        cache.observe(np.array(ids))
        assert torch.equal(looked_up(cache, table, everything), table)
