"""A step is staged in groups, and its scores come back in its own order."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from behaviours import numbered
from relaygr import Candidates
from relaygr.engine.buckets import APPEND_BUCKETS
from relaygr.engine.staging import _LENT, Out, Staged, Staging
from relaygr.engine.step import Served, Step
from relaygr.engine.trays import Trays
from relaygr.history import PAGE
from relaygr.model import build_model
from relaygr.model.batch import AppendRow, ScoreRow
from relaygr.model.inputs import NO_CONTEXT

MODEL = build_model("hstu", layers=1, dim=8, heads=1, items=500_000, seed=0, tasks=2, scale_length=1.0)
SERVED = Served(MODEL, "v", 0, trays=Trays(MODEL.config, 4))
LONG = numbered(100_000)


def step(counts: list[int], appends: int = 0) -> Step:
    scores = [ScoreRow(Candidates(np.arange(count)), None, 0, 0, []) for count in counts]
    history = numbered(60)
    rows = [AppendRow(history, NO_CONTEXT, 0, 10 + index, [index]) for index in range(appends)]
    return Step(SERVED, rows, scores)


def staged(work: Step, staging: Staging, *, captured: bool = True) -> Staged:
    return Staged(work if captured else work._replace(served=replace(SERVED, trays=None)), staging)


@pytest.mark.parametrize("lent", [True, False])
def test_scores_go_back_to_the_rows_they_are_of(lent: bool) -> None:
    counts = [3, 700, 1, 128, 2500, 129]
    held = staged(step(counts), Staging(4))
    out = held.take_out(2)
    out.lent = lent
    held.launched()
    begin = 0
    for group in held.scores:
        for row, count in zip(group.rows, group.counts, strict=True):
            assert len(row.candidates) == count
            out.values[begin : begin + count] = float(counts.index(count))
            begin += count
    for member, part in enumerate(held.results()):
        assert part.shape == (counts[member], 2)
        assert (part == member).all()


def read(
    staging: Staging, counts: list[int], value: float, tasks: int = 2
) -> tuple[Out, list[npt.NDArray[np.float32]]]:
    """What comes out of a step all of whose scores are this one, and where it came out."""
    held = staged(step(counts), staging)
    out = held.take_out(tasks)
    held.launched()
    out.values[: sum(counts)] = value
    scores = held.results()
    held.release()
    return out, scores


def test_room_is_used_again_once_nobody_holds_any_of_its_scores() -> None:
    staging = Staging(4)
    out, scores = read(staging, [5, 6], 1.0)
    part = scores[1][2:, 0]
    del scores
    other, _ = read(staging, [5], 2.0)
    assert other is not out
    assert (part == 1.0).all()
    del part, _
    assert {id(read(staging, [5], 3.0)[0]) for _ in range(4)} == {id(out), id(other)}


@given(
    st.lists(st.tuples(st.sampled_from((1, 5, 900, 3000)), st.sampled_from((1, 1, 2)), st.integers(0, 40)), max_size=80)
)
def test_scores_that_are_held_do_not_change(steps: list[tuple[int, int, int]]) -> None:
    """However many are, and for however long."""
    staging = Staging(4)
    held: dict[int, tuple[list[npt.NDArray[np.float32]], float]] = {}
    for number, (count, tasks, longer) in enumerate(steps):
        _, scores = read(staging, [count, 7], float(number), tasks)
        held[number] = scores[longer % 2 :], number + longer
        held = {each: (parts, until) for each, (parts, until) in held.items() if until > number}
        for each, (parts, _) in held.items():
            assert all((part == float(each)).all() for part in parts)


def test_scores_that_everybody_keeps_take_no_more_room_than_was_lent() -> None:
    staging = Staging(4)
    kept = [read(staging, [5], float(number)) for number in range(40)]
    assert sum(out.lent for out, _ in kept) == _LENT
    assert [float(scores[0][0, 0]) for _, scores in kept] == list(range(40))


def test_buffers_are_used_again_only_when_their_step_has_ended() -> None:
    staging = Staging(4)
    first, second = staged(step([5], appends=3), staging), staged(step([5], appends=3), staging)
    pointers = [held.appends[0].packed.words.data_ptr() for held in (first, second)]
    assert len(set(pointers)) == 2
    first.release()
    assert staged(step([5], appends=3), staging).appends[0].packed.words.data_ptr() == pointers[0]


def test_rows_that_were_laid_out_are_named_and_others_are_laid_out_now() -> None:
    staging, work = Staging(4), step([5, 600, 7])
    assert SERVED.trays is not None
    rows = [SERVED.trays.now(work.scores[0]), *work.scores[1:]]
    held = staged(work._replace(scores=rows), staging)
    assert rows[0].laid is not None
    trays = {count: tray for group in held.scores for count, tray in zip(group.counts, group.trays, strict=True)}
    assert trays[5] == rows[0].laid.tray.address
    assert len(set(trays.values())) == 3
    for group in held.scores:
        assert group.packed is None
        for row, count in zip(group.rows, group.counts, strict=True):
            assert row.laid is not None
            assert row.laid.tray.items[:count].tolist() == list(range(count))


def test_rows_that_cannot_all_be_laid_out_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    trays = Trays(MODEL.config, 4)
    work = step([5, 7, 600])._replace(served=replace(SERVED, trays=trays))
    rows = [trays.now(work.scores[0]), *work.scores[1:]]
    monkeypatch.setattr(trays, "_pin", lambda rows, free, most_bytes: False)
    for _, free in trays._free:
        free.clear()
    held = staged(work._replace(scores=rows), Staging(4))
    (group,) = held.scores
    assert group.packed is not None
    assert (group.bucket, group.trays, held.replayed) == (None, [], False)
    assert group.packed.items[: group.total].tolist() == [*range(600), *range(7), *range(5)]


def test_what_is_not_captured_is_staged_as_it_is() -> None:
    held = staged(step([5, 600], appends=2), Staging(4), captured=False)
    (scores,), (appends,) = held.scores, held.appends
    assert scores.packed is not None
    assert (scores.bucket, scores.packed.shape.rows, scores.counts, scores.trays) == (None, 605, (5, 600), [])
    assert (appends.bucket, appends.packed.shape.rows) == (None, 21)


def test_the_ids_are_those_of_every_row_and_of_no_padding() -> None:
    expected = [*numbered(60).items[:10].tolist(), *range(7), *range(5)]
    for captured in (True, False):
        held = staged(step([7, 5], appends=1), Staging(4), captured=captured)
        assert held.ids().tolist() == expected
        assert held.ids().dtype == np.int32


def test_a_long_append_runs_in_pieces_one_after_the_other() -> None:
    longest = max(bucket.rows for bucket in APPEND_BUCKETS)
    history = numbered(3 * longest + 70)
    pages = list(range(-(-len(history) // PAGE)))
    rows = [AppendRow(history, NO_CONTEXT, 20, high, pages) for high in (3 * longest + 70, 50, longest + 21)]
    held = staged(Step(SERVED, rows, []), Staging(len(pages)))
    ran = [(row.low, row.high) for group in held.appends for row in group.rows]
    first = [(low, low + longest) for low in range(20, 3 * longest, longest)]
    assert ran[:4] == [*first, first[0]]
    assert ran[4:] == [(20 + 3 * longest, 3 * longest + 70), (20, 50), (20 + longest, longest + 21)]
    assert [len(group.rows) for group in held.appends] == [1, 1, 1, 1, 3]
    assert all(group.bucket is not None for group in held.appends)


@pytest.mark.parametrize(
    ("grain", "low", "high", "pieces"),
    [
        (4096, 16384, 16384 + 4096 + 512, [4096, 512]),
        (4096, 16384, 16384 + 4096 + 2457, [4096, 2457]),
        (4096, 16384, 16384 + 4096 + 2458, [6554]),  # nearly as much as a grain more
        (4096, 16384, 16384 + 4096 + 256, [4352]),  # too little to be worth it
        (4096, 16384 - PAGE, 16384 - PAGE + 4608, [4608]),  # few keys
        (4096, 16384, 16384 + 512, [512]),
        (4096, 16384 + 100, 16384 + 4096 + 512, [3996, 512]),  # rounds are of whole pages
        (4096, 0, 42_752, [16384, 16384, 8192, 1792]),
        (4096, 0, 14_207, [14_207]),
        (PAGE, 16384, 16384 + PAGE + 46, [PAGE + 46]),  # a device that has no rounds
    ],
)
def test_what_would_take_another_round_of_the_device_for_a_little_is_cut_off(
    grain: int, low: int, high: int, pieces: list[int]
) -> None:
    history = numbered(high)
    row = AppendRow(history, NO_CONTEXT, low, high, range(-(-high // PAGE)))
    held = staged(Step(replace(SERVED, grain=grain), [row], []), Staging(400))
    assert [row.high - row.low for group in held.appends for row in group.rows] == pieces


@pytest.mark.parametrize(("head", "base", "high"), [(256, 300, 9000), (9000, 9100, 9104), (40_000, 50_000, 50_001)])
def test_what_is_new_runs_behind_the_head_and_not_beside_it(head: int, base: int, high: int) -> None:
    pages = np.arange(-(-high // PAGE))
    other = AppendRow(LONG, NO_CONTEXT, 0, 3000, np.arange(30))
    rows = [AppendRow(LONG, NO_CONTEXT, low, end, pages) for low, end in ((0, head), (base, high))]
    held = staged(Step(replace(SERVED, grain=4096), [*rows, other], []), Staging(800))
    ran = [[(row.low, row.high) for row in group.rows if row.pages is pages] for group in held.appends]
    assert all(len(group) <= 1 for group in ran)
    reached = 0
    for low, end in (row for group in ran for row in group):
        assert low == (base if reached == head else reached)
        reached = end
    assert reached == high


@given(st.lists(st.tuples(st.integers(0, 40_000), st.integers(1, 60_000)), min_size=1, max_size=6))
@settings(max_examples=30)
def test_pieces_of_one_append_follow_each_other_and_never_run_together(appends: list[tuple[int, int]]) -> None:
    rows = [AppendRow(LONG, NO_CONTEXT, low, low + new, [user]) for user, (low, new) in enumerate(appends)]
    held = staged(Step(replace(SERVED, grain=4096), rows, []), Staging(800))
    reached = [low for low, _ in appends]
    for group in held.appends:
        users = [row.pages[0] for row in group.rows]
        assert len(set(users)) == len(users)
        assert group.bucket is not None
        for row in group.rows:
            assert row.low == reached[row.pages[0]]
            reached[row.pages[0]] = row.high
    assert reached == [low + new for low, new in appends]
