"""What an optional part is missing for is reported as skipped, and fails where CI=true.

At the top of a module, or in a test:

    triton = require("triton", "make test installs it where it can be had")
    if shutil.which("haproxy") is None:
        missing("haproxy", "make system")
"""

import importlib
import os
from types import ModuleType
from typing import NoReturn

import pytest

__all__ = ["missing", "on_ci", "require"]


def on_ci() -> bool:
    """Whether everything optional must be there."""
    return os.environ.get("CI") == "true"


def missing(what: str, remedy: str) -> NoReturn:
    """End the test, or the module when called while it is imported. `remedy` says how to get `what`."""
    reason = f"{what} is missing: {remedy}"
    if on_ci():
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def require(module: str, remedy: str) -> ModuleType:
    """The imported module, if it is there. One that is there and fails to import is an error, not missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.split(".")[0] != error.name.split(".")[0]:
            raise
        missing(module, remedy)
