"""A prefix serves exactly what it holds the KV of: compared with histories laid side by side."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from behaviours import histories, lengths, numbered
from relaygr.cache import Identity, Lineage, Prefix
from relaygr.history import PAGE, History, SteppedWindow

NO_CONTEXT = np.empty(0, np.int64)
COLUMNS = ("items", "actions", "timestamps")


def lineage(history: History, context: Any = (), *, version: str = "v", epoch: int = 0) -> Lineage:
    return Lineage.of(version, epoch, np.array(context, np.int64), history)


def prefix(history: History, context: Any = (), *, user: str = "u", version: str = "v", epoch: int = 0) -> Prefix:
    pages = np.arange(-(-(len(context) + len(history)) // PAGE), dtype=np.int64)
    return Prefix.of(user, lineage(history, context, version=version, epoch=epoch), history, pages)


def corrected(history: History, at: int, column: str) -> History:
    """The history with one behaviour changed; a changed time changes the ones that would be before it too."""
    columns = {name: getattr(history, name).copy() for name in COLUMNS}
    if column == "timestamps":
        columns[column][: at + 1] = np.minimum(columns[column][: at + 1], columns[column][at] - 1)
    else:
        columns[column][at] ^= 1
    return History(**columns, start=history.start)


def common(one: History, other: History) -> int:
    """How many behaviours two histories have alike, from their starts."""
    shortest = min(len(one), len(other))
    unlike = np.zeros(shortest, bool)
    for column in COLUMNS:
        unlike |= getattr(one, column)[:shortest] != getattr(other, column)[:shortest]
    return int(unlike.argmax()) if unlike.any() else shortest


@st.composite
def pairs(draw: st.DrawFn) -> tuple[History, History]:
    """A history, and it again: grown, cut, corrected at some place, or something else altogether."""
    whole = numbered(draw(lengths()) + 1, salt=draw(st.integers(0, 1)))
    one, other = whole[: draw(st.integers(0, len(whole)))], whole[: draw(st.integers(0, len(whole)))]
    for _ in range(draw(st.integers(0, 2))):
        if len(other):
            at = draw(st.integers(0, len(other) - 1))
            other = corrected(other, at, draw(st.sampled_from(COLUMNS)))
    return one, draw(st.sampled_from((other, other, other, numbered(len(other), salt=7))))


@given(pairs())
def test_a_prefix_agrees_with_all_of_itself_or_with_whole_pages(pair: tuple[History, History]) -> None:
    held, asked = pair
    alike = common(held, asked)
    expected = len(held) if alike == len(held) else alike // PAGE * PAGE
    assert prefix(held).agrees(asked) == expected


@given(histories(), st.integers(0, 4 * PAGE))
def test_a_prefix_agrees_with_every_history_it_is_the_beginning_of(history: History, length: int) -> None:
    held = history[:length]
    assert prefix(held).agrees(history) == len(held)
    assert prefix(history).agrees(held) in (len(held), len(held) // PAGE * PAGE)


@given(lengths(), st.data())
def test_a_corrected_history_keeps_the_whole_pages_before_the_correction(length: int, data: st.DataObject) -> None:
    history = numbered(length + 1)
    at = data.draw(st.integers(0, length))
    column = data.draw(st.sampled_from(("items", "actions")))
    assert prefix(history).agrees(corrected(history, at, column)) == at // PAGE * PAGE


@given(pairs(), st.integers(0, 3))
def test_two_prefixes_share_their_whole_pages_alike_from_the_start(pair: tuple[History, History], context: int) -> None:
    one, other = (prefix(history, range(context)) for history in pair)
    assert one.shares(other) == other.shares(one) == common(*pair) // PAGE * PAGE


@given(pairs(), st.booleans())
def test_a_prefix_includes_its_whole_pages_and_no_others(pair: tuple[History, History], other_context: bool) -> None:
    one, other = prefix(pair[0]), prefix(pair[1], range(int(other_context)))
    alike = common(*pair) == len(pair[1]) <= len(pair[0]) and len(pair[1]) % PAGE == 0
    assert one.includes(other) is (alike and not other_context)


@given(lengths(), st.data())
def test_the_first_behaviours_of_a_prefix_are_the_prefix_of_those_behaviours(length: int, data: st.DataObject) -> None:
    history = numbered(length)
    context = range(data.draw(st.integers(0, 64)))
    held = prefix(history, context)
    kept = data.draw(st.sampled_from([*range(0, length + 1, PAGE), length]))
    first, made = held.first(kept), prefix(history[:kept], context)
    assert first.identity == made.identity
    assert first.page_digests == made.page_digests
    assert first.tokens == made.tokens
    assert first.pages.tolist() == made.pages.tolist()
    assert first.agrees(history) == kept


@given(lengths(), st.lists(st.integers(0, 2**62), max_size=64), st.integers(0, 1000))
def test_a_prefix_knows_what_it_was_made_of(length: int, context: list[int], start: int) -> None:
    history = numbered(length, first=start)
    held = prefix(history, context, user="somebody", version="x", epoch=3)
    assert held.tokens == len(context) + length
    assert held.identity == Identity("somebody", held.lineage, length, history.digest())
    assert (held.lineage.version, held.lineage.epoch, held.lineage.start) == ("x", 3, start)
    assert held.lineage.context_tokens == len(context)


def test_other_pages_are_the_same_prefix() -> None:
    held = prefix(numbered(300))
    elsewhere = held.on(np.array([7, 5, 3], np.int64), 0)
    assert elsewhere.identity == held.identity
    assert elsewhere.pages.tolist() == [7, 5, 3]
    assert held.pages.tolist() == [0, 1, 2]
    assert elsewhere.agrees(numbered(400)) == 300


@given(lengths(), st.lists(st.integers(0, 9), max_size=4))
def test_equal_parts_make_equal_identities(length: int, context: list[int]) -> None:
    whole = numbered(length + 10)
    grown = whole[: length // 2].append(*(getattr(whole[length // 2 : length], column) for column in COLUMNS))
    assert prefix(whole[:length], context).identity == prefix(grown, list(context)).identity


CHANGES: dict[str, Prefix] = {
    "user": prefix(numbered(300), (1, 2), user="v"),
    "version": prefix(numbered(300), (1, 2), version="w"),
    "epoch": prefix(numbered(300), (1, 2), epoch=1),
    "context value": prefix(numbered(300), (1, 3)),
    "context order": prefix(numbered(300), (2, 1)),
    "more context": prefix(numbered(300), (1, 2, 0)),
    "less context": prefix(numbered(300), (1,)),
    "no context": prefix(numbered(300)),
    "longer": prefix(numbered(301), (1, 2)),
    "shorter": prefix(numbered(299), (1, 2)),
    "window": prefix(History(*(getattr(numbered(300), column) for column in COLUMNS), start=128), (1, 2)),
    "old item": prefix(corrected(numbered(300), 0, "items"), (1, 2)),
    "old action": prefix(corrected(numbered(300), 0, "actions"), (1, 2)),
    "old time": prefix(corrected(numbered(300), 0, "timestamps"), (1, 2)),
    "last item": prefix(corrected(numbered(300), 299, "items"), (1, 2)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_changes_the_identity(change: str) -> None:
    identities = {prefix(numbered(300), (1, 2)).identity, *(other.identity for other in CHANGES.values())}
    assert len(identities) == 1 + len(CHANGES)
    assert CHANGES[change].identity != prefix(numbered(300), (1, 2)).identity


@given(lengths(), st.data())
def test_a_change_of_any_behaviour_changes_the_identity(length: int, data: st.DataObject) -> None:
    history = numbered(length + 1)
    at = data.draw(st.integers(0, length))
    for column in COLUMNS:
        assert prefix(corrected(history, at, column)).identity != prefix(history).identity


def test_context_ids_do_not_run_into_each_other() -> None:
    contexts = ((), (0,), (0, 0), (1,), (2**32,), (1, 0), (0, 1))
    assert len({lineage(numbered(3), context) for context in contexts}) == len(contexts)


@pytest.mark.parametrize(
    ("held", "wanted", "accept", "serves"),
    [
        (3, 3, 0, True),
        (2, 3, 0, False),
        (2, 3, 1, True),
        (1, 3, 1, False),
        (1, 3, 2, True),
        (4, 3, 0, False),
        (4, 3, 5, False),  # tables that are ahead are another model's
    ],
)
def test_tables_a_little_behind_serve_where_that_is_accepted(held: int, wanted: int, accept: int, serves: bool) -> None:
    history = numbered(300)
    assert lineage(history, epoch=held).serves(lineage(history, epoch=wanted), accept) is serves


@pytest.mark.parametrize("accept", [0, 3])
@pytest.mark.parametrize(
    "other",
    [
        lineage(numbered(10), (1,), version="w"),
        lineage(numbered(10), (2,)),
        lineage(numbered(10), ()),
        lineage(numbered(10, first=128), (1,)),
    ],
    ids=["version", "context", "no context", "window"],
)
def test_no_epochs_accepted_make_up_for_another_version_context_or_window(other: Lineage, accept: int) -> None:
    held = lineage(numbered(10), (1,))
    assert held.serves(held, accept)
    assert not held.serves(other, accept)
    assert not other.serves(held, accept)


@given(st.integers(1, 3), st.integers(0, 2 * PAGE), st.integers(1, 8 * PAGE), st.integers(0, PAGE))
def test_a_prefix_of_a_window_serves_until_the_window_moves(steps: int, slack: int, total: int, more: int) -> None:
    window = SteppedWindow(cap=steps * PAGE + slack, step=steps * PAGE)
    before, after = window.apply(numbered(total)), window.apply(numbered(total + more))
    held = prefix(before)
    if before.start == after.start:
        assert held.lineage.serves(lineage(after), 0)
        assert held.agrees(after) == len(before)
    else:
        assert not held.lineage.serves(lineage(after), 0)


def test_an_empty_prefix_agrees_with_everything_and_holds_nothing() -> None:
    empty = prefix(History.empty())
    assert empty.tokens == 0
    assert empty.agrees(numbered(300)) == empty.agrees(History.empty()) == 0
    assert empty.shares(prefix(numbered(300))) == 0
    assert prefix(numbered(300)).agrees(History.empty()) == 0


def test_without_its_head_a_prefix_is_the_same_in_fewer_pages() -> None:
    held = prefix(numbered(300))
    short = held.without_head(1)
    assert short.identity == held.identity
    assert (short.missing, short.head, short.pages.tolist()) == (1, PAGE, held.pages.tolist()[1:])
    assert short.without_head(1).missing == 2
    assert short.first(300) is short
    assert (short.first(256).length, short.first(256).pages.tolist()) == (256, held.pages.tolist()[1:2])
    assert short.first(128).pages.tolist() == []
    assert held.covers(short)
    assert not short.covers(held)
    assert short.agrees(numbered(300)) == 300
