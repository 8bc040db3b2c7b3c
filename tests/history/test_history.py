"""Histories are what they were made of, for good, and refuse what is wrong by name."""

import copy
import pickle
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from behaviours import LAST, histories, lengths, numbered, split
from relaygr.errors import InvalidInput
from relaygr.history import PAGE, History
from relaygr.history.digest import EMPTY

COLUMNS = ("items", "actions", "timestamps")
DTYPES = {"items": np.int64, "actions": np.int32, "timestamps": np.int64}
GOOD: dict[str, Any] = {"items": [1, 2, 3], "actions": [0, 1, 2], "timestamps": [10, 10, 12]}


def columns(history: History) -> dict[str, Any]:
    return {name: getattr(history, name) for name in COLUMNS}


def test_columns_have_their_types_and_cannot_be_written() -> None:
    history = History(**GOOD)
    assert len(history) == 3
    assert history.start == 0
    for name, dtype in DTYPES.items():
        column = getattr(history, name)
        assert column.dtype == dtype
        assert column.tolist() == GOOD[name]
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 5
    assert repr(history) == "History(3 behaviours from 0)"


def test_nobody_has_an_empty_history() -> None:
    empty = History.empty()
    assert len(empty) == 0
    assert empty == History([], [], []) == History(*(np.empty(0, DTYPES[name]) for name in COLUMNS))
    assert empty.digest() == EMPTY
    assert empty.gaps(0, 0).tolist() == []
    assert empty[:] == empty


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (5, "one-dimensional"),
        (None, "one-dimensional"),
        ("123", "one-dimensional"),
        ([[1, 2, 3]], "one-dimensional"),
        (np.zeros((3, 1), np.int64), "one-dimensional"),
        ([[1], [2, 3]], "not an array"),
        ([1.0, 2.0, 3.0], "integers"),
        (np.zeros(3, np.float32), "integers"),
        ([True, False, True], "integers"),
        (["1", "2", "3"], "integers"),
        ([1, 2, None], "integers"),
        (np.zeros(3, "datetime64[s]"), "integers"),
        ([1, 2, 2**64], "integers"),
        (np.array([1, 2, 2**63], np.uint64), "do not fit"),
        ([1, 2], "entries"),
        ([1, 2, 3, 4], "entries"),
    ],
)
def test_bad_input_is_refused_by_the_name_of_its_field(name: str, bad: Any, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem) as caught:
        History(**{**GOOD, name: bad})
    # Of two columns of different lengths, the one that is not `items` is named.
    assert caught.value.field == ("actions" if problem == "entries" and name == "items" else name)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("items", [1, -2, 3]),
        ("actions", [0, 0, -1]),
        ("actions", [0, 2**31, 0]),
        ("timestamps", [3, 2, 4]),
        ("start", -1),
        ("start", 1.5),
        ("start", None),
    ],
)
def test_values_out_of_range_are_refused_by_the_name_of_their_field(name: str, bad: Any) -> None:
    with pytest.raises(InvalidInput, match=f"^{name}: "):
        History(**{**GOOD, name: bad})


@given(histories(), st.data())
def test_the_first_time_that_goes_backwards_is_told(history: History, data: st.DataObject) -> None:
    assume(len(history) > 1 and history.timestamps[-1] > history.timestamps[0])
    at = data.draw(st.integers(1, len(history) - 1))
    assume(history.timestamps[at - 1] > history.timestamps[0])
    times = history.timestamps.copy()
    times[at] = times[0]
    with pytest.raises(InvalidInput, match=f"^timestamps: .*behaviour {at}$"):
        History(history.items, history.actions, times)


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda values: array("q", values)])
def test_any_sequence_of_integers_will_do(kind: Any) -> None:
    assert History(**{name: kind(values) for name, values in GOOD.items()}) == History(**GOOD)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64, ">i8", ">i4"])
def test_any_integer_type_that_fits_will_do(dtype: Any) -> None:
    made = History(*(np.array(GOOD[name], dtype) for name in COLUMNS))
    assert made == History(**GOOD)
    assert made.digest() == History(**GOOD).digest()


def test_strided_columns_are_taken_by_content() -> None:
    wide = np.arange(40, dtype=np.int64).reshape(10, 4)
    made = History(wide[:, 0], wide[:, 1].astype(np.int32)[::1], wide[::1, 2])
    assert made == History(wide[:, 0].copy(), wide[:, 1].copy(), wide[:, 2].copy())
    assert made.digest() == History(*(wide[:, i].copy() for i in range(3))).digest()


@given(histories(), st.sampled_from(["own", "view", "locked", "bytearray"]))
def test_writing_to_the_callers_arrays_changes_nothing(history: History, kind: str) -> None:
    assume(len(history))
    theirs: dict[str, Any] = {}
    given_away: dict[str, Any] = {}
    for name, column in columns(history).items():
        own = np.frombuffer(bytearray(column.tobytes()), column.dtype) if kind == "bytearray" else column.copy()
        theirs[name] = own
        given_away[name] = own if kind == "own" else own[:]
        if kind in ("locked", "bytearray"):
            given_away[name].flags.writeable = False
    made = History(**given_away)
    digest = made.digest()
    for own in theirs.values():
        own[:] = 77
    assert made == history
    assert made.digest() == digest == History(**columns(made)).digest()


def test_an_array_unlocked_again_changes_nothing() -> None:
    items = np.arange(3)
    items.flags.writeable = False
    made = History(items, [0, 0, 0], [0, 0, 0])
    items.flags.writeable = True
    items[:] = 9
    assert made.items.tolist() == [0, 1, 2]


def test_what_nobody_can_write_to_is_not_copied() -> None:
    raw = numbered(200).items.tobytes()
    for buffer in (raw, memoryview(raw)):
        items = np.frombuffer(buffer, np.int64)
        made = History(items[10:], np.zeros(190, np.int32), np.zeros(190, np.int64))
        assert np.shares_memory(made.items, items)


@given(histories(), lengths(), lengths(), lengths(), lengths())
def test_slices_of_slices_are_slices(history: History, a: int, b: int, c: int, d: int) -> None:
    part = history[a:b]
    assert part.start == history.start + min(a, len(history))
    assert columns(part)["items"].tolist() == history.items[a:b].tolist()
    assert part[c:d].items.tolist() == history.items[a:b][c:d].tolist()
    assert part[c:d].start == part.start + min(c, len(part))
    assert np.shares_memory(part.items, history.items) == bool(len(part))
    assert history[-len(part) :] == history[len(history) - len(part) :] or not len(part)


def test_a_history_is_sliced_in_steps_of_one_and_not_indexed() -> None:
    history = numbered(10)
    with pytest.raises(TypeError):
        history[3]  # type: ignore[index]
    for step in (2, -1):
        with pytest.raises(InvalidInput, match=r"^step: "):
            history[::step]


@given(histories(), st.lists(lengths(), max_size=3))
def test_appends_put_together_what_was_taken_apart(history: History, cuts: list[int]) -> None:
    grown = History.empty()
    for part in split(history, cuts):
        before, copied = grown, History(**columns(grown))
        grown = grown.append(*part)
        assert before == copied
        assert before.digest() == copied.digest()
    assert grown == history
    assert grown.digest() == history.digest()


def test_an_append_keeps_the_windows_start() -> None:
    window = numbered(300)[200:]
    new = numbered(50, first=300)
    longer = window.append(new.items, new.actions, new.timestamps)
    assert longer.start == 200
    assert longer == numbered(350)[200:]


@pytest.mark.parametrize("name", COLUMNS)
def test_a_bad_append_is_refused_by_the_name_of_its_field(name: str) -> None:
    history = History(**GOOD)
    with pytest.raises(InvalidInput, match=f"^{name}: "):
        history.append(**{**GOOD, "timestamps": [12, 12, 12], name: [0.5, 1, 2]})
    assert history == History(**GOOD)


def test_an_append_older_than_the_last_behaviour_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^timestamps: go backwards at behaviour 0"):
        History(**GOOD).append([1], [1], [11])
    assert len(History(**GOOD).append([1], [1], [12])) == 4


@given(histories(), histories())
def test_equality_is_by_content(one: History, other: History) -> None:
    assert one == History(**columns(one), start=5)
    same = all(columns(one)[name].tolist() == columns(other)[name].tolist() for name in COLUMNS)
    assert (one == other) is same
    assert (one != other) is not same
    assert one != columns(one)
    with pytest.raises(TypeError):
        hash(one)


@given(histories(), st.booleans())
def test_copies_are_as_good_as_the_original(history: History, hashed: bool) -> None:
    history = history[len(history) // 3 :]
    if hashed:
        history.digest()
    for made in (pickle.loads(pickle.dumps(history)), copy.deepcopy(history)):
        assert made == history
        assert made.start == history.start
        assert made.digest() == history.digest()
        assert not any(column.flags.writeable for column in columns(made).values())


@given(histories(), lengths(), lengths())
def test_gaps_are_seconds_from_the_behaviour_before(history: History, low: int, high: int) -> None:
    low, high = sorted((min(low, len(history)), min(high, len(history))))
    times = history.timestamps.tolist()
    expected = [min(times[i] - times[i - 1], LAST) if i else 0 for i in range(low, high)]
    gaps = history.gaps(low, high)
    assert gaps.dtype == np.int64
    assert gaps.tolist() == expected


def test_a_gap_too_long_to_count_is_the_longest() -> None:
    history = History([1, 2, 3, 4], [0] * 4, [-LAST, 1, 2, LAST])
    assert history.gaps(0, 4).tolist() == [0, LAST, 1, LAST - 2]
    assert history.gaps(2, 4).tolist() == [1, LAST - 2]


@given(histories(), lengths())
def test_gaps_do_not_change_with_what_follows(history: History, length: int) -> None:
    length = min(length, len(history))
    assert history.gaps(0, len(history))[:length].tolist() == history[:length].gaps(0, length).tolist()


def test_a_windows_first_gap_is_zero() -> None:
    window = numbered(3 * PAGE)[PAGE:]
    assert window.timestamps[0] > 0
    assert window.gaps(0, 2)[0] == 0
