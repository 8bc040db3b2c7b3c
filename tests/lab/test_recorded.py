"""Recorded users come as often as asked for, and keep their gaps; lengths come from where they are said to."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr.errors import InvalidInput
from relaygr.history import LmdbStore
from relaygr.history.quantiles import Quantiles
from relaygr.lab.recorded import Recorded, stored_lengths
from relaygr.lab.trace import Trace
from relaygr.lab.workload import Workload

DAY = 86_400.0


def gaps(trace: Trace) -> list[float]:
    """Seconds between two requests of one user."""
    order = np.lexsort((trace.at, trace.user))
    follows = np.diff(trace.user[order]) == 0
    found: list[float] = np.round(np.diff(trace.at[order])[follows], 6).tolist()
    return found


def users() -> Recorded:
    """Four requests of two users in 10 s."""
    return Recorded([3.0, 0.0, 7.0, 3.5], ["b", "a", "a", "b"], "recorded: here", [300, 100, 107, 304])


@pytest.mark.parametrize("rate", [0.04, 0.4, 4.0, 400.0])
def test_users_are_repeated_or_left_out_until_the_rate_is_there_and_keep_their_gaps(rate: float) -> None:
    """A tenth of the rate at which they were recorded, that rate, and more."""
    seconds = 2000 / rate
    trace = Workload(rate, seconds, past_s=50, recorded=users(), lengths="500").trace()
    for part, long in ((trace.at >= 0, seconds), (trace.at < 0, 50)):
        assert part.sum() == pytest.approx(rate * long, abs=5 * np.sqrt(2 * rate * long))
    found = gaps(trace)
    assert set(found) == {7.0, 0.5}
    assert found.count(7.0) == pytest.approx(found.count(0.5), rel=0.2)
    assert trace.returning == pytest.approx(0.5, abs=0.05)


def test_the_rate_is_held_where_users_came_for_days() -> None:
    at = [second + day * DAY + more for second in range(50) for day in range(3) for more in (0.0, 5.0)]
    user = [name for name in range(50) for _ in range(6)]
    trace = Workload(50, 40, past_s=20, recorded=Recorded(at, user, "days")).trace()
    assert (trace.at >= 0).sum() / 40 == pytest.approx(50, rel=0.15)
    assert set(gaps(trace)) == {5.0}


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4000)), min_size=1, max_size=30, unique=True),
    rate=st.floats(0.01, 20),
    past_s=st.floats(0, 300),
    seed=st.integers(0, 9),
)
def test_what_is_seen_of_a_user_is_a_run_of_what_a_recorded_user_did(
    rows: list[tuple[int, int]], rate: float, past_s: float, seed: int
) -> None:
    recorded = Recorded([at for _, at in rows], [user for user, _ in rows], "any", [at + 1 for _, at in rows])
    trace = Workload(rate, 60.0, past_s=past_s, seed=seed, new=0, recorded=recorded, lengths="recorded").trace()
    assert trace.at.min(initial=0.0) >= -past_s
    assert trace.at.max(initial=0.0) < 60.0
    for user in set(trace.user.tolist()):
        mine = trace.user == user
        first = int(trace.length[mine][0]) - 1  # when it was recorded, which here is how long its history was
        seen = tuple(np.rint(trace.at[mine] - trace.at[mine][0] + first).astype(int).tolist())
        runs = [tuple(sorted(at for name, at in rows if name == each)) for each in range(5)]
        assert any(seen == run[low : low + len(seen)] for run in runs for low in range(len(run))), seen


def test_lengths_that_were_recorded_are_the_users_own() -> None:
    trace = Workload(50, 100, past_s=0, new=0, recorded=users(), lengths="recorded").trace()
    followed = {}
    for user in set(trace.user.tolist()):
        mine = trace.user == user
        if mine.sum() == 2:
            followed[round(float(np.diff(trace.at[mine])[0]), 6)] = set(trace.length[mine].tolist())
    assert followed == {7.0: {100}, 0.5: {300}}
    assert not trace.made["hybrid"]


def test_facts_of_two_sources_are_a_hybrid(tmp_path: Path) -> None:
    stored = Quantiles.of([100, 200], "behaviours of 2 users in the store here")
    assert Workload(1, 1, recorded=users()).hybrid
    assert Workload(1, 1, recorded=users(), lengths="store:here", stored=stored).hybrid
    assert not Workload(1, 1, recorded=users(), lengths="2048").hybrid
    assert not Workload(1, 1, lengths="store:here", stored=stored).hybrid


def test_lengths_of_a_store_are_those_of_its_users(tmp_path: Path) -> None:
    with LmdbStore(tmp_path / "store") as store:
        for user, length in enumerate((3, 50, 50, 400)):
            store.append(f"u{user}", [1] * length, [0] * length, list(range(length)))
    found = stored_lengths(str(tmp_path / "store"))
    trace = Workload(200, 20, "reuse", lengths="store:here", stored=found).trace()
    assert set(trace.length.tolist()) >= {3, 50, 400}
    assert np.median(trace.length) == 50
    assert trace.made["sources"]["lengths"] == f"behaviours of 4 users in the store {tmp_path / 'store'}"


def test_what_is_no_store_with_users_is_refused(tmp_path: Path) -> None:
    LmdbStore(tmp_path / "empty").close()
    for name, said in (("missing", "no folder with a store"), ("empty", "no users")):
        with pytest.raises(InvalidInput, match=f"^lengths: .*{said}"):
            stored_lengths(str(tmp_path / name))
    assert not (tmp_path / "missing").exists()


def test_files_of_all_kinds_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("user,at,length,more\n7,0.5,10,x\n7,2.5,12,y\n8,1,5,z\n")
    (tmp_path / "dated.csv").write_text(
        "at,user,length\n2026-01-01 00:00:00.5,7,10\n2026-01-01 00:00:02.5,7,12\n2026-01-01 00:00:01.0,8,5\n"
    )
    pq.write_table(
        pa.table({"at": [100.5, 102.5, 101.0], "user": ["a", "a", "b"], "length": [10, 12, 5]}), tmp_path / "p"
    )
    read = [Recorded.read(tmp_path / name) for name in ("r.csv", "dated.csv", "p")]
    assert len({each.digest for each in read}) == 1
    assert [each.source for each in read] == ["recorded: r.csv", "recorded: dated.csv", "recorded: p"]
    assert read[0].returning
    assert users().digest != read[0].digest


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("who,at\na,1\n", "user"),
        ("user,when\na,1\n", "at"),
        ("user,at\na,soon\n", "at"),
        ("user,at\na,1\nb,\n", "at"),
        ("user,at\n", "recorded"),
        ("user,at,length\na,1,-3\n", "length"),
        ("user,at,length\na,1,2.5\n", "length"),
        ("user,at,length\na,1,long\n", "length"),
        ("", "recorded"),
    ],
)
def test_files_that_do_not_say_who_came_when_are_refused_by_name(tmp_path: Path, text: str, field: str) -> None:
    (tmp_path / "r.csv").write_text(text)
    with pytest.raises(InvalidInput, match=f"^{field}: "):
        Recorded.read(tmp_path / "r.csv")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for name in ("r.csv", "r.parquet"):
        with pytest.raises(InvalidInput, match=r"^recorded: cannot be read"):
            Recorded.read(tmp_path / name)


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("profile", {"profile": "globo"}),
        ("arrivals", {"arrivals": "even"}),
        ("reuse", {"reuse": 0.5}),
        ("lengths", {"lengths": "recorded", "recorded": Recorded([0.0], ["a"], "no lengths")}),
        ("lengths", {"lengths": "recorded", "recorded": None}),
        ("lengths", {"lengths": "store:here"}),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(field: str, settings: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match=f"^{field}: "):
        Workload(**({"rate": 10.0, "seconds": 10.0, "recorded": users()} | settings))  # type: ignore[arg-type]
