"""Tokens are exact integers that depend on nothing behind them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle
from paged import random_history
from relaygr.history import History
from relaygr.model import ModelConfig
from relaygr.model.tokens import (
    GAP_ROWS,
    POSITION_ROWS,
    candidate_tokens,
    history_tokens,
    kind_rows,
    log_bucket,
    table_row,
    table_rows,
)

CONFIG = ModelConfig(family="hstu", layers=1, dim=8, heads=1, head_dim=8, items=1000, contexts=40, actions=8)
NO_CONTEXT = np.empty(0, np.int64)
WIDEST = 2**63 - 1


def array(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


@given(st.integers(0, 2**31 - 1), st.integers(0, 8))
def test_a_bucket_is_exact_integer_arithmetic(value: int, bits: int) -> None:
    assert log_bucket(array(value), bits)[0] == oracle.bucket(value, bits, 2**31 - 1)


@pytest.mark.parametrize("bits", [2, 7])
def test_buckets_are_exact_for_small_values_and_rise_one_by_one_at_powers_of_two(bits: int) -> None:
    exact = np.arange(2 ** (bits + 1))
    assert np.array_equal(log_bucket(exact, bits), exact)
    for exponent in range(bits + 1, 52):
        below, at = log_bucket(array(2**exponent - 1, 2**exponent), bits)
        assert at == below + 1
        assert at == oracle.bucket(2**exponent, bits, WIDEST)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=2), st.integers(0, 8))
def test_buckets_never_fall_as_values_rise(values: list[int], bits: int) -> None:
    assert (np.diff(log_bucket(np.sort(np.array(values, np.int64)), bits)) >= 0).all()


def test_an_octave_has_its_share_of_buckets() -> None:
    assert len(set(log_bucket(np.arange(2**12, 2**13), 2).tolist())) == 4
    assert len(set(log_bucket(np.arange(2**12, 2**13), 7).tolist())) == 128


@given(st.integers(0, WIDEST), st.integers(1, 2**31))
def test_a_row_is_the_id_or_its_hash(id_: int, rows: int) -> None:
    found = int(table_row(array(id_), rows)[0])
    assert found == oracle.row(id_, rows)
    assert 0 <= found < rows
    assert found == id_ or id_ >= rows


@pytest.mark.parametrize("id_", [2**63 - 1, 2**63 - 2, 2**62, 2**32, 2**31, 2**53 + 1, 1000])
def test_large_ids_are_hashed_exactly_beside_small_ones(id_: int) -> None:
    assert table_row(array(id_, 999, 0, id_), 1000).tolist() == [oracle.row(id_, 1000), 999, 0, oracle.row(id_, 1000)]


def test_hashes_spread_over_the_rows() -> None:
    rows = table_row(np.arange(2**40, 2**40 + 100_000), 100)
    counts = np.bincount(rows, minlength=100)
    assert counts.min() > 850
    assert counts.max() < 1150


def test_rows_of_all_tokens_lie_within_their_tables() -> None:
    history = History([0, 999, WIDEST, 5], [0, 7, 3, 1], [-(2**62), 0, 0, 2**62])
    tokens = history_tokens(CONFIG, history, array(0, 39, 40, WIDEST), 0, 8)
    candidates = candidate_tokens(CONFIG, array(0, 999, WIDEST), 2**40)
    for part in (tokens, candidates):
        assert (part >= 0).all()
        assert (part < [table_rows(CONFIG), kind_rows(CONFIG), GAP_ROWS, POSITION_ROWS]).all()
    assert (tokens[:4, 0] >= CONFIG.items).all()
    assert (tokens[4:, 0] < CONFIG.items).all()


def test_the_longest_gap_and_the_farthest_position_share_the_last_bucket() -> None:
    history = History([1, 1, 1, 1], [0, 0, 0, 0], [-(2**63), 2**63 - 1, 2**63 - 1, 2**63 - 1])
    tokens = history_tokens(CONFIG, history, NO_CONTEXT, 0, 4)
    assert tokens[:, 2].tolist() == [0, GAP_ROWS - 2, 0, 0]
    for position in (2**24 - 1, 2**24, 2**60):
        assert candidate_tokens(CONFIG, array(1), position)[0, 3] == POSITION_ROWS - 2


def test_none_is_a_row_of_its_own() -> None:
    context = history_tokens(CONFIG, History.empty(), array(3, 3), 0, 2)
    assert context[:, 2].tolist() == [GAP_ROWS - 1] * 2
    assert context[:, 3].tolist() == [POSITION_ROWS - 1] * 2
    assert context[:, 1].tolist() == [CONFIG.actions + 1, CONFIG.actions + 2]
    candidate = candidate_tokens(CONFIG, array(3), 5)[0]
    assert candidate.tolist() == [3, CONFIG.actions, GAP_ROWS - 1, 5]


@given(st.integers(0, 2**32), st.data())
def test_a_token_depends_on_nothing_behind_it(seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    history, context = random_history(rng, 60), rng.integers(0, 100, 3)
    low = data.draw(st.integers(0, 63))
    high = data.draw(st.integers(low, 63))
    whole = history_tokens(CONFIG, history, context, 0, 63)
    cut = history[: max(high - 3, 0)]
    assert np.array_equal(history_tokens(CONFIG, cut, context, low, high), whole[low:high])


def test_the_gap_of_a_windows_first_behaviour_is_zero_and_positions_count_from_it() -> None:
    history = History(range(10), [0] * 10, [100 * i for i in range(10)])
    tokens = history_tokens(CONFIG, history[4:], NO_CONTEXT, 0, 6)
    assert tokens[:, 2].tolist() == [0] + [oracle.bucket(100, 2, 2**31 - 1)] * 5
    assert tokens[:, 3].tolist() == list(range(6))
    assert tokens[:, 0].tolist() == list(range(4, 10))
