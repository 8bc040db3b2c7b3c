"""The file that keeps what came of each probe."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relaygr.errors import InvalidInput
from relaygr.lab.device import Device
from relaygr.lab.outputs import checked_file
from relaygr.lab.probe import Probe

__all__ = ["ProbeFile", "Start"]


@dataclass(frozen=True)
class Start:
    """Where a search begins: measured and simulated once, since it would not come out the same again."""

    device: Device
    guesses: dict[str, float]
    """By mode."""


class ProbeFile:
    """One line of JSON for each probe, written when it is done: a search that was ended goes on where it was.

    Where it began is a line, too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._told: dict[str, dict[str, Any]] = {}
        self._starts: dict[str, Start] = {}
        for number, line in enumerate(_text(path).splitlines(), 1):
            try:
                row = json.loads(line)
                if "search" in row:
                    self._starts[row["search"]] = Start(Device.of(row["device"]), row["guesses"])
                    continue
                self._told[json.dumps(row["probe"], sort_keys=True)] = row
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidInput("probes", f"line {number} of {path} is no probe: {error}") from error

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._told.values())

    def find(self, probe: Probe) -> dict[str, Any] | None:
        """What came of this very probe, if it was run before."""
        row = self._told.get(probe.key)
        return None if row is None else row["told"]

    def add(self, probe: Probe, told: dict[str, Any], **more: Any) -> None:
        row = {"probe": json.loads(probe.key), "told": told, **more}
        self._told[probe.key] = row
        self._write(row)

    def start(self, search: str) -> Start | None:
        """Where this very search began, if it did before."""
        return self._starts.get(search)

    def begin(self, search: str, start: Start) -> None:
        self._starts[search] = start
        self._write({"search": search, **asdict(start)})

    def _write(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _text(path: Path) -> str:
    """What is in the file; nothing where there is none yet."""
    checked_file("probes", path)
    try:
        return path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput("probes", f"cannot be read: {error}") from error
