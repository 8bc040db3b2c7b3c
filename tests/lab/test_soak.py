"""A short soak: only documented answers while an instance is killed and frozen, and nothing left behind."""

import asyncio
from pathlib import Path

from relaygr.lab.soak import Soak, soak


def test_a_run_with_faults_leaves_nothing_behind(tmp_path: Path) -> None:
    told = asyncio.run(soak(Soak(requests=5000, kills=1, freezes=2), tmp_path))
    assert told["unexpected"] == 0, told
    assert told["unanswered"] == 0, told
    assert told["answers"]["200"] > 4000, told
    assert told["scores"]["wrong"] == 0, told
    assert told["scores"]["looked_at"] > 1000, told
    assert told["cost_model_error"] <= 0.15, told
    assert told["grown"]["tasks"] <= 0, told
    held = ("leases", "pinned_pages", "ranks", "load_tokens")
    assert not any(told["after"][name] for name in held), told
    assert told["before"]["processes"] == told["after"]["processes"], told
    assert told["grown"]["descriptors"] <= 16, told
    assert told["grown"]["memory_mib"] <= 128, told
