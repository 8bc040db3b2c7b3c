"""Whatever happens, in whatever order: right scores, calls that end, pages that are conserved."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from relaygr import Path, PreInferOutcome
from schedules import Report, faulty, run_schedule


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices run many times faster without a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run_all(seeds: range, *, with_torch: bool) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Of all: paths, outcomes, faults. Some of their prefixes have lost their heads."""
    paths: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    shortened = 0
    failed = {}
    for seed in seeds:
        try:
            report: Report = run_schedule(seed, torch=with_torch, faulty=faulty(seed))
        except Exception as error:
            failed[seed] = error
        else:
            paths += report.paths
            outcomes += report.outcomes
            faults += report.faults
            shortened += report.shortened
    option = " --torch" if with_torch else ""
    assert not failed, f"replay one with `python tests/schedules.py SEED{option}`: {failed}"
    assert shortened > len(seeds) / 10
    return paths, outcomes, faults


def test_a_thousand_schedules_of_faults_give_right_scores_and_lose_no_page() -> None:
    paths, outcomes, faults = run_all(range(1000), with_torch=False)
    assert set(paths) == set(Path)
    assert set(outcomes) == set(PreInferOutcome)
    assert set(faults) == {"step", "copy IN", "copy OUT"}


def test_schedules_without_faults_take_every_path_too() -> None:
    paths, _, faults = run_all(range(1000, 1400, 4), with_torch=False)
    assert set(paths) == set(Path)
    assert not faults


def test_schedules_of_real_models_agree_with_the_dense_float64_oracle() -> None:
    paths, _, faults = run_all(range(2000, 2080), with_torch=True)
    assert set(paths) == set(Path)
    assert faults["step"]


def test_a_schedule_replays_from_its_seed() -> None:
    assert run_schedule(5) == run_schedule(5)
