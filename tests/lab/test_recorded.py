"""Recorded users come as often as asked for, and keep their gaps; lengths come from where they are said to."""

import gzip
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optional import require
from redis_server import redis_server
from relaygr.cli.lab_options import with_own
from relaygr.errors import InvalidInput
from relaygr.history import LmdbStore, open_store
from relaygr.history.opening import without_password
from relaygr.history.quantiles import Quantiles
from relaygr.lab.outcome import Budgets
from relaygr.lab.probe import Probe
from relaygr.lab.recorded import Recorded, stored_lengths
from relaygr.lab.trace import Trace
from relaygr.lab.tuning import Tuning
from relaygr.lab.workload import Workload
from relaygr.serving.modes import Mode

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
    assert Workload(1, 1, recorded=users(), lengths="store", stored=stored).hybrid
    assert not Workload(1, 1, recorded=users(), lengths="2048").hybrid
    assert not Workload(1, 1, lengths="store", stored=stored).hybrid
    named = Recorded([0.0, 1.0], ["a", "a"], "recorded: set directly.csv")
    assert Workload(1, 1, recorded=named).hybrid


def test_lengths_of_a_store_are_those_of_its_users(tmp_path: Path) -> None:
    with LmdbStore(tmp_path / "store") as store:
        for user, length in enumerate((3, 50, 50, 400)):
            store.append(f"u{user}", [1] * length, [0] * length, list(range(length)))
    found = stored_lengths(str(tmp_path / "store"))
    trace = Workload(200, 20, "reuse", lengths="store", stored=found).trace()
    assert set(trace.length.tolist()) >= {3, 50, 400}
    assert np.median(trace.length) == 50
    assert trace.made["sources"]["lengths"] == f"behaviours of 4 users in the store {tmp_path / 'store'}"


def test_users_of_a_store_without_behaviours_count_as_having_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One may be deleted between being named and being asked for."""
    with LmdbStore(tmp_path / "store") as store:
        store.append("a", [1] * 3, [0] * 3, list(range(3)))
    monkeypatch.setattr(LmdbStore, "users", lambda self: iter(["a", "gone"]))
    found = stored_lengths(str(tmp_path / "store"))
    assert {value for _, value in found.points} == {1, 3}


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("redis://me:secret@host:6379/0", "host:6379/0"),
        ("rediss://host/0?password=secret", "rediss://host/0"),
        ("rediss://host/0?password=a@secret", "rediss://…"),
        ("redis://me:sec?ret@host/0", "redis://…"),
        ("redis://me:sec/ret#@host/0", "host/0"),
        ("unix://me:secret@/run/redis.sock?db=1", "/run/redis.sock"),
        ("/srv/me@here/store", "/srv/me@here/store"),
    ],
)
def test_a_store_is_shown_without_its_password(name: str, shown: str) -> None:
    assert without_password(name) == shown


def test_lengths_of_a_store_are_known_by_their_contents_and_tell_no_password(tmp_path: Path) -> None:
    require("redis", "pip install 'relaygr[redis]'")
    with redis_server(tmp_path / "redis") as server, open_store(server.url) as store:
        names = [f"store:{server.url.replace('unix://', 'unix://default:secret@')}", f"store:{server.url}"]
        with pytest.raises(InvalidInput, match=r"^lengths: (?!.*secret).* has no users"):
            with_own(Workload(10, 5), None, names[0])
        store.append("a", [1] * 70, [0] * 70, list(range(70)))
        found = [with_own(Workload(10, 5), None, name) for name in names]
    with LmdbStore(tmp_path / "store") as folder:
        folder.append("a", [1] * 70, [0] * 70, list(range(70)))
    found.append(with_own(Workload(10, 5), None, f"store:{tmp_path / 'store'}"))
    budgets = Budgets(50.0, 200.0)
    keys = [Probe(Mode.FULL, each, budgets, Tuning.of(budgets, Mode.FULL)).key for each in found]
    assert len(set(keys)) == 1
    told = [keys, found[0].told(), found[0].sources, found[0].trace().made, found[0].length_quantiles.source]
    assert "secret" not in json.dumps(told)
    assert found[0].sources["lengths"].endswith("redis.sock")


def test_a_store_that_cannot_be_opened_is_refused_by_the_name_of_the_option() -> None:
    require("redis", "pip install 'relaygr[redis]'")
    with pytest.raises(InvalidInput, match=r"^lengths: (?!.*secret).*host:port") as refused:
        stored_lengths("redis://me:secret@host:port/0")
    assert refused.value.field == "lengths"


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


def test_dates_and_seconds_say_the_same_where_these_are_no_sums_of_halves(tmp_path: Path) -> None:
    """With a time zone as well, and of users' names the order alone counts."""
    tenths = [0.1, 0.7, 2.3]
    texts = {
        "seconds.csv": [f"{second}" for second in tenths],
        "since.csv": [f"{1_767_225_600 + second}" for second in tenths],
        "dated.csv": [f"2026-01-01 00:00:0{second}" for second in tenths],
        "zoned.csv": [f"2026-01-01T00:00:0{second}Z" for second in tenths],
    }
    for number, (name, times) in enumerate(texts.items()):
        rows = [f"{user}{number},{at}" for user, at in zip("aab", times, strict=True)]
        (tmp_path / name).write_text("\n".join(["user,at", *rows]))
    zoned = pa.table(
        {
            "at": pa.array([int(1e6 * second) for second in tenths], pa.timestamp("us", "Europe/Paris")),
            "user": ["a", "a", "b"],
        }
    )
    pq.write_table(zoned, tmp_path / "zoned.parquet")
    assert len({Recorded.read(tmp_path / name).digest for name in (*texts, "zoned.parquet")}) == 1
    assert Recorded(tenths, ["b", "b", "a"], "other").digest != Recorded(tenths, ["a", "a", "b"], "same").digest


def test_times_with_a_zone_and_none_but_whole_seconds_are_read(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("user,at\na,2026-01-01T00:00:00Z\na,2026-01-01T00:00:05Z\n")
    assert Recorded.read(tmp_path / "r.csv").digest == Recorded([0.0, 5.0], ["a", "a"], "same").digest


def test_what_kind_a_file_is_the_end_of_its_name_says(tmp_path: Path) -> None:
    pq.write_table(pa.table({"at": [0.0, 1.0], "user": ["a", "b"]}), tmp_path / "x.csv.parquet")
    (tmp_path / "X.CSV").write_text("user,at\na,0\nb,1\n")
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(b"user,at\na,0\nb,1\n"))
    digests = {Recorded.read(tmp_path / name).digest for name in ("x.csv.parquet", "X.CSV", "x.csv.gz")}
    assert len(digests) == 1


@pytest.mark.parametrize("name", ["NA", "null", "nan"])
def test_users_may_be_called_anything_but_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "r.csv").write_text(f"user,at\n{name},0\n{name},1\n")
    assert Recorded.read(tmp_path / "r.csv").returning


def test_a_user_who_came_all_day_takes_no_more_memory_than_what_is_seen() -> None:
    """30 users, each every 2 s for two days: of a copy 30 s are seen."""
    at = np.arange(0.0, 2 * DAY, 2.0)
    recorded = Recorded(np.tile(at, 30), np.repeat(np.arange(30), len(at)), "days")
    rows = 30 * len(at)
    tracemalloc.start()
    try:
        found = recorded.requests(np.random.default_rng(0), 200.0, -10.0, 20.0, "poisson")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found.at) == pytest.approx(6000, rel=0.1)
    assert most < 12 * 8 * rows


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1e5)), min_size=1, max_size=30),
    since=st.sampled_from([0.0, 1.7e9]),
    low=st.sampled_from([0.0, -0.1, -300.0, -1e7]),
    seed=st.integers(0, 9),
)
def test_what_is_drawn_is_all_of_every_copy_that_is_seen(
    rows: list[tuple[int, float]], since: float, low: float, seed: int
) -> None:
    """The same as by writing out every copy in full."""
    recorded = Recorded(
        [since + at for _, at in rows], [user for user, _ in rows], "any", list(range(1, len(rows) + 1))
    )
    high, rate = low + 200.0, 0.3
    found = recorded.requests(np.random.default_rng(seed), rate, low, high, "poisson")
    random = np.random.default_rng(seed)
    users, times, lengths = recorded._user, recorded._at, recorded._length
    assert lengths is not None
    parts: list[list[int]] = []
    for index in range(len(times)):
        if index and users[index] == users[index - 1] and times[index] - times[index - 1] < high - low:
            parts[-1].append(index)
        else:
            parts.append([index])
    span = np.array([times[part[-1]] - times[part[0]] for part in parts])
    copies = np.repeat(np.arange(len(parts)), random.poisson(rate / len(times) * (span + (high - low))))
    begun = random.uniform(low - span[copies], high)
    seen = [
        (copy, at, lengths[index])
        for copy, (part, begin) in enumerate(zip(copies, begun, strict=True))
        for index in parts[part]
        if low <= (at := begin + (times[index] - times[parts[part][0]])) < high
    ]
    assert found.length is not None
    assert list(zip(found.user, found.at, found.length, strict=True)) == seen


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("who,at\na,1\n", "has no column 'user'; "),
        ("user,when\na,1\n", "has no column 'at'; "),
        ("user,at\na,soon\n", "column 'at' of "),
        ("user,at\na,1\nb,\n", "has no 'at' in 1 rows"),
        ("user,at\na,1\n,2\n", "has no 'user' in 1 rows"),
        ('user,at\na,1\n"",2\n', "has no 'user' in 1 rows"),
        ("user,at\n", "must have"),
        ("user,at,length\na,1,-3\n", "length must not"),
        ("user,at,length\na,1,2.5\n", "length must be"),
        ("user,at,length\na,1,long\n", "column 'length' of "),
        ("", "cannot be read"),
    ],
)
def test_files_that_do_not_say_who_came_when_are_refused_with_the_column(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "r.csv").write_text(text)
    with pytest.raises(InvalidInput, match=f"^recorded: {said}"):
        Recorded.read(tmp_path / "r.csv")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for name in ("r.csv", "r.parquet"):
        with pytest.raises(InvalidInput, match=r"^recorded: .* does not exist$"):
            Recorded.read(tmp_path / name)


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("profile", {"profile": "globo"}),
        ("arrivals", {"arrivals": "even"}),
        ("reuse", {"reuse": 0.5}),
        ("lengths", {"lengths": "recorded", "recorded": Recorded([0.0], ["a"], "no lengths")}),
        ("lengths", {"lengths": "recorded", "recorded": None}),
        ("lengths", {"lengths": "store"}),
        ("lengths", {"lengths": "2048", "stored": Quantiles.constant(300)}),
        ("lengths", {"stored": Quantiles.constant(300)}),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(field: str, settings: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match=f"^{field}: "):
        Workload(**({"rate": 10.0, "seconds": 10.0, "recorded": users()} | settings))  # type: ignore[arg-type]


def test_what_share_of_returns_comes_within_a_time_is_told() -> None:
    users = Recorded(np.array([0.0, 1.0, 11.0, 5.0]), np.array(["a", "a", "a", "b"]), "here")
    assert [users.returns_within(seconds) for seconds in (0.5, 2.0, 20.0)] == [0.0, 0.5, 1.0]
    assert Recorded(np.array([0.0]), np.array(["a"]), "here").returns_within(1.0) == 1.0
