"""Traces are drawn from their seed, come back as they should, and never change the gaps of a user."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr.errors import InvalidInput
from relaygr.lab.chains import running_sums
from relaygr.lab.quantiles import GLOBO_GAPS, LENGTHS
from relaygr.lab.trace import Trace
from relaygr.lab.workload import Workload


def gaps(trace: Trace) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Seconds between two requests of one user."""
    order = np.lexsort((trace.at, trace.user))
    follows = np.diff(trace.user[order]) == 0
    found: np.ndarray[tuple[int], np.dtype[np.float64]] = np.diff(trace.at[order])[follows]
    return found


def same(one: Trace, other: Trace) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one._columns().values(), other._columns().values(), strict=True))


@pytest.mark.parametrize("profile", ["globo", "refresh", "reuse"])
def test_the_same_seed_draws_the_same_trace_and_another_draws_another(profile: str) -> None:
    traces = [Workload(20, 30, profile, seed=seed).trace() for seed in (1, 1, 2)]  # type: ignore[arg-type]
    assert same(traces[0], traces[1])
    assert not same(traces[0], traces[2])


@pytest.mark.parametrize("profile", ["refresh", "reuse"])
@pytest.mark.parametrize("rate", [50.0, 400.0])
def test_the_rate_is_held_before_and_after_the_start(profile: str, rate: float) -> None:
    trace = Workload(rate, 60, profile, past_s=60).trace()  # type: ignore[arg-type]
    for part in (trace.at >= 0, trace.at < 0):
        assert part.sum() / 60 == pytest.approx(rate, rel=0.15)


@pytest.mark.parametrize("reuse", [0.0, 0.3, 0.6, 0.95])
def test_so_many_return_as_were_asked_for(reuse: float) -> None:
    trace = Workload(200, 120, "reuse", reuse=reuse, past_s=120).trace()
    assert trace.returning == pytest.approx(reuse, abs=0.03)


def test_a_higher_rate_means_more_users_and_not_shorter_gaps() -> None:
    slow, fast = (Workload(rate, 120, "refresh").trace() for rate in (50, 500))
    assert np.median(gaps(fast)) == pytest.approx(np.median(gaps(slow)), rel=0.05)
    assert len(set(fast.user.tolist())) > 7 * len(set(slow.user.tolist()))
    assert gaps(fast).min() >= 2.0
    assert gaps(fast).max() <= 10.0


def test_gaps_of_the_news_portal_are_as_they_were_seen() -> None:
    seen = gaps(Workload(2, 4000, "globo", past_s=4000).trace())
    short = seen[seen < 1000]
    expected = GLOBO_GAPS.at(np.random.default_rng(0).random(200_000))
    assert np.median(short) == pytest.approx(np.median(expected[expected < 1000]), rel=0.15)


def test_lengths_follow_the_distribution_and_grow_by_what_is_new() -> None:
    trace = Workload(300, 60, "reuse", reuse=0.5, longest=10**6).trace()
    first = trace.length[trace.visit == 0]
    assert np.quantile(first, 0.5) == pytest.approx(8327, rel=0.1)
    assert np.quantile(first, 0.9) == pytest.approx(24418, rel=0.1)
    order = np.lexsort((trace.at, trace.user))
    follows = np.diff(trace.user[order]) == 0
    assert np.array_equal(np.diff(trace.length[order])[follows], trace.new[order][1:][follows])
    assert trace.new[trace.visit > 0].mean() == pytest.approx(4, rel=0.1)


def test_histories_are_cut_to_the_longest() -> None:
    assert Workload(100, 20, longest=1000).trace().length.max() == 1000


def test_stage_times_have_the_middle_and_the_tail_that_are_stated() -> None:
    times = Workload(2000, 30).trace().retrieval_ms
    assert np.median(times) == pytest.approx(60, rel=0.02)
    assert np.quantile(times, 0.99) == pytest.approx(120, rel=0.05)


def test_a_trace_of_two_sources_says_that_it_is_a_hybrid() -> None:
    assert Workload(5, 10, "globo").trace().made["hybrid"]
    assert not Workload(5, 10, "refresh").trace().made["hybrid"]
    assert not Workload(5, 10, "globo", lengths="4096").trace().made["hybrid"]


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = Workload(20, 20).trace()
    trace.save(tmp_path / "trace.parquet")
    read = Trace.load(tmp_path / "trace.parquet")
    assert same(trace, read)
    assert read.made == trace.made


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pytest.raises(InvalidInput, match=r"trace: .* does not exist"):
        Trace.load(tmp_path / "missing.parquet")
    pq.write_table(pa.table({"at": [1.0]}), tmp_path / "other.parquet")
    with pytest.raises(InvalidInput, match="not written by"):
        Trace.load(tmp_path / "other.parquet")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rate", 0.0),
        ("seconds", -1.0),
        ("profile", "monthly"),
        ("reuse", 1.0),
        ("lengths", "long"),
        ("lengths", "0"),
        ("candidates", 0),
        ("past_s", float("nan")),
    ],
)
def test_what_cannot_be_is_refused_by_name(field: str, value: object) -> None:
    settings: dict[str, object] = {"rate": 10.0, "seconds": 10.0, "profile": "reuse"} | {field: value}
    with pytest.raises(InvalidInput, match=field):
        Workload(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["reuse", "gap_s", "skew"])
def test_what_one_profile_reads_is_refused_beside_another(field: str) -> None:
    with pytest.raises(InvalidInput, match=field):
        Workload(10, 10, "globo", **{field: 0.5})  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-9, 9)), max_size=40))
def test_running_sums_are_each_users_own(rows: list[tuple[int, int]]) -> None:
    users, values = np.array([u for u, _ in rows], np.int64), np.array([v for _, v in rows], np.int64)
    sums = running_sums(users, values)
    for index in range(len(rows)):
        assert sums[index] == sum(v for u, v in rows[: index + 1] if u == rows[index][0])


@given(st.floats(0, 1))
def test_a_distribution_stays_between_its_points(share: float) -> None:
    for known in LENGTHS.values():
        value = float(known.at(np.array([share]))[0])
        assert known.points[0][1] <= value * (1 + 1e-9)
        assert value <= known.points[-1][1] * (1 + 1e-9)
