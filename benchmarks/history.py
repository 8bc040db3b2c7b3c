"""How fast histories are read, appended and hashed: `python benchmarks/history.py`."""

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from common import percentile, time_calls, write_result
from relaygr.history import PAGE, History, LmdbStore
from relaygr.history.digest import bytes_hash

USERS = 100
LENGTH = 8192
LONG = 131_072
RUNS = 2000
READ_TARGET_MS = 0.2
XXH3, BLAKE2B = (f"{name} of {LENGTH // PAGE} pages" for name in ("xxh3-128", "blake2b-128"))


def behaviours(length: int, seed: int) -> History:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.integers(0, 3600, length))
    return History(rng.integers(0, 10**9, length), rng.integers(0, 16, length), times)


def user(run: int) -> str:
    return f"user-{run % USERS}"


def append(store: LmdbStore, count: int, whom: Callable[[int], str]) -> Callable[[int], object]:
    new = (np.arange(count), np.zeros(count, np.int32), np.full(count, 2**40))
    return lambda run: store.append(whom(run), *new)


def measure(folder: Path) -> dict[str, list[float]]:
    store = LmdbStore(folder / "store")
    store.append_many({user(number): behaviours(LENGTH, number) for number in range(USERS)})
    for name in ("long", "long-16"):
        store.append_many({name: behaviours(LONG, USERS)})
    history = behaviours(LENGTH, 0)
    columns = (history.items, history.actions, history.timestamps)
    history.digest()
    kept = []
    pages = [np.random.default_rng(page).bytes(PAGE * 20) for page in range(LENGTH // PAGE)]
    unwritten: dict[str, Callable[[int], object]] = {
        f"read {LENGTH}": lambda run: store.read(user(run)),
        f"read {LENGTH}, every result kept": lambda run: kept.append(store.read(user(run))),
        f"read last {PAGE} of {LENGTH}": lambda run: store.read(user(run), PAGE),
        "length and digest": lambda run: (store.length(user(run)), store.digest(user(run))),
        "digest at a length inside a page": lambda run: store.digest(user(run), LENGTH - 7),
        f"fresh History of {LENGTH} and its digest": lambda run: History(*columns).digest(),
        "one behaviour more and the digest": lambda run: history.append([1], [1], [2**40]).digest(),
        XXH3: lambda run: [bytes_hash(page) for page in pages],
        BLAKE2B: lambda run: [hashlib.blake2b(page, digest_size=16).digest() for page in pages],
    }
    times = {}
    for name, call in track(unwritten.items(), "reading", transient=True):
        times[name] = time_calls(call, RUNS)
        kept.clear()
    for durable in (True, False):
        store.close()
        store = LmdbStore(folder / "store", durable=durable)
        kind = "durable" if durable else "not durable"
        runs = RUNS // 4
        times[f"append 1 to {LENGTH}, {kind}"] = time_calls(append(store, 1, user), runs)
        times[f"append 16 to {LENGTH}, {kind}"] = time_calls(append(store, 16, user), runs)
        times[f"append 1 to {LONG}, {kind}"] = time_calls(append(store, 1, lambda run: "long"), runs)
        times[f"append 16 to {LONG}, {kind}"] = time_calls(append(store, 16, lambda run: "long-16"), runs)
    store.close()
    return times


def main() -> None:
    # On disk, not in memory: durable appends must pay for their flush.
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        times = measure(Path(folder))
        size = (Path(folder) / "store" / "data.mdb").stat().st_size
    table = Table("what", "p50 ms", "p99 ms", title=f"Histories: {USERS} users of {LENGTH} behaviours")
    figures: dict[str, object] = {}
    for name, taken in times.items():
        p50, p99 = percentile(taken, 50), percentile(taken, 99)
        figures[name] = {"p50_ms": round(p50, 5), "p99_ms": round(p99, 5), "runs": len(taken)}
        table.add_row(name, f"{p50:.4f}", f"{p99:.4f}")
    read = percentile(times[f"read {LENGTH}"], 50)
    ratio = percentile(times[BLAKE2B], 50) / percentile(times[XXH3], 50)
    figures["read target"] = {"p50_ms": READ_TARGET_MS, "reached": read < READ_TARGET_MS}
    figures["blake2b-128 over xxh3-128"] = round(ratio, 1)
    console = Console()
    console.print(table)
    console.print(f"reading {LENGTH} in {READ_TARGET_MS} ms: {'reached' if read < READ_TARGET_MS else 'not reached'}")
    console.print(f"blake2b takes {ratio:.1f} times as long as xxh3")
    inputs = {
        "users": USERS,
        "length": LENGTH,
        "page": PAGE,
        "lmdb": lmdb.version(),
        "file_bytes": size,
    }
    console.print(f"written to {write_result('history-cpu', inputs, figures)}")


if __name__ == "__main__":
    main()
