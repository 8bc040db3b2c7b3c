"""Digests say what a prefix is, at the cost of what is new."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import assume, given
from hypothesis import strategies as st

from behaviours import histories, lengths, numbered, split
from relaygr.errors import InvalidInput
from relaygr.history import PAGE, History, chain, page_hash
from relaygr.history.digest import EMPTY, page_bytes, page_hashes


def defined(history: History, length: int) -> bytes:
    """The definition, computed afresh and in one go."""
    digest = bytes(16)
    for low in range(0, length, PAGE):
        page = slice(low, min(low + PAGE, length))
        state = xxhash.xxh3_128()
        for column in (history.items, history.actions, history.timestamps):
            state.update(column[page].tobytes())
        digest = xxhash.xxh3_128_digest(digest + state.digest())
    return digest


def fresh(history: History) -> History:
    return History(history.items, history.actions, history.timestamps, start=history.start)


def changed(history: History, at: int, column: str) -> History:
    columns = {name: getattr(history, name).copy() for name in ("items", "actions", "timestamps")}
    columns[column][at] ^= 1
    columns["timestamps"].sort()
    return History(**columns)


def test_digests_never_change_between_versions() -> None:
    history = numbered(300)
    assert history.digest(0) == EMPTY == bytes(16)
    assert history.digest(1).hex() == "cdc561ca6fecb440100c739438cfad6f"
    assert history.digest(128).hex() == "5683bae9108e00f46f0fb36aa02c5b38"
    assert history.digest(300).hex() == "c1c048adf31742e00a1e91c737991e65"


@given(histories(), lengths())
def test_a_digest_is_the_chain_of_page_hashes(history: History, length: int) -> None:
    length = min(length, len(history))
    assert history.digest(length) == defined(history, length)
    assert len(history.digest()) == 16


@given(histories(), st.lists(lengths(), max_size=4))
def test_however_a_history_grew_its_digests_are_the_same(history: History, cuts: list[int]) -> None:
    grown = History.empty()
    for part in split(history, cuts):
        grown = grown.append(*part)
        assert grown.digest() == history.digest(len(grown))
    assert grown == history
    assert grown.page_hashes() == history.page_hashes()
    assert grown.digest() == fresh(history).digest()


@given(histories(), lengths(), lengths())
def test_what_follows_does_not_change_a_digest(history: History, length: int, more: int) -> None:
    length = min(length, len(history))
    assert history.digest(length) == history[:length].digest()
    rest = numbered(more)
    longer = History(
        np.concatenate((history.items[:length], rest.items)),
        np.concatenate((history.actions[:length], rest.actions)),
        np.maximum.accumulate(np.concatenate((history.timestamps[:length], rest.timestamps))),
    )
    assert longer.digest(length) == history.digest(length)


@given(histories(), st.data(), st.sampled_from(["items", "actions", "timestamps"]))
def test_changing_any_behaviour_changes_every_digest_behind_it(
    history: History, data: st.DataObject, column: str
) -> None:
    assume(len(history))
    at = data.draw(st.integers(0, len(history) - 1))
    other = changed(history, at, column)
    assume(other != history)
    first = next(i for i in range(len(history)) if history[i : i + 1] != other[i : i + 1])
    assert history.digest(first) == other.digest(first)
    for length in {first + 1, min(first + PAGE, len(history)), len(history)}:
        assert history.digest(length) != other.digest(length)


@given(histories(), st.integers(0, 4), lengths())
def test_a_window_that_moves_by_pages_reuses_their_hashes(history: History, pages: int, length: int) -> None:
    history.digest()
    window = history[pages * PAGE :][:length]
    assert len(window.page_hashes()) == len(window) // PAGE
    kept = history.page_hashes()[pages : pages + len(window) // PAGE]
    assert all(ours is theirs for ours, theirs in zip(window.page_hashes(), kept, strict=True))
    assert window.digest() == fresh(window).digest()


@given(histories(), lengths(), lengths())
def test_any_slice_has_the_digest_of_its_content(history: History, low: int, high: int) -> None:
    history.digest()
    assert history[low:high].digest() == defined(fresh(history[low:high]), len(history[low:high]))


@given(histories())
def test_page_digests_are_the_digests_at_whole_pages(history: History) -> None:
    for length in (0, len(history) // 2, len(history)):
        expected = [history.digest(low) for low in range(0, length + 1, PAGE)]
        assert history.page_digests(length) == expected


def test_lists_handed_out_are_the_callers() -> None:
    history = numbered(3 * PAGE)
    digest = history.digest()
    history.page_hashes().clear()
    history.page_digests(len(history)).clear()
    assert history.digest() == digest


def test_pages_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(items: Any, actions: Any, timestamps: Any) -> bytes:
        hashed.append(len(items))
        return page_hash(items, actions, timestamps)

    def counted_pages(items: Any, actions: Any, timestamps: Any) -> list[bytes]:
        hashed.extend([PAGE] * (len(items) // PAGE))
        return page_hashes(items, actions, timestamps)

    monkeypatch.setattr("relaygr.history.history.page_hashes", counted_pages)
    monkeypatch.setattr("relaygr.history.history.page_hash", counted)
    history = numbered(5 * PAGE + 7)
    history.digest()
    assert hashed == [PAGE] * 5 + [7]
    hashed.clear()
    new = numbered(PAGE, first=len(history))
    longer = history.append(new.items, new.actions, new.timestamps)
    longer.digest()
    assert hashed == [PAGE, 7]
    hashed.clear()
    longer[PAGE : 5 * PAGE].digest()
    longer.digest(3 * PAGE)
    assert hashed == []


def test_threads_that_share_a_history_agree() -> None:
    expected = numbered(64 * PAGE).digest()
    with ThreadPoolExecutor(8) as threads:
        for _ in range(20):
            history = numbered(64 * PAGE)
            half = [threads.submit(history.digest, page * PAGE) for page in range(0, 65, 5)]
            whole = [threads.submit(history.digest) for _ in range(8)]
            assert {future.result() for future in whole} == {expected}
            assert all(future.result() for future in half)
            assert len(history.page_hashes()) == 64


@pytest.mark.parametrize("length", [-1, 11, 1.0, "1"])
def test_a_length_outside_the_history_is_named(length: int) -> None:
    for call in (numbered(10).digest, numbered(10).page_digests):
        with pytest.raises(InvalidInput, match=r"^length: "):
            call(length)


def test_a_page_is_its_columns_one_behind_the_other() -> None:
    history = numbered(5)
    columns = (history.items, history.actions, history.timestamps)
    assert page_bytes(*columns) == b"".join(column.tobytes() for column in columns)
    assert chain(EMPTY, page_hash(*columns)) == history.digest()
