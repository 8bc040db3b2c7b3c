"""What holds for all tests: how Hypothesis searches, and that tests for a GPU are run where there is one."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from optional import on_ci, require

# Machines differ in speed, so no example has a deadline; `timeout` in pyproject.toml ends what hangs.
settings.register_profile("dev", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
# The same examples on every run: a change fails for what it changed.
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.register_profile("long", settings.get_profile("dev"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if on_ci() else "dev"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those on Ray come last: its processes are there only then."""
    items.sort(key=lambda item: item.get_closest_marker("ray") is not None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def ray_running() -> Iterator[str]:
    """The address of Serve's proxy on a small Ray cluster: one for all tests, for it takes seconds to start."""
    require("ray", "make test installs it where it can be had")
    from ray_fleet import running_ray

    with running_ray() as address:
        yield address
