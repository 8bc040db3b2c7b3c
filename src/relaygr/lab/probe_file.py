"""The file that keeps what came of each probe."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from relaygr.errors import InvalidInput
from relaygr.lab.device import Device
from relaygr.lab.outputs import checked_file
from relaygr.lab.probe import Probe

__all__ = ["ProbeFile", "Searched", "Start"]


@dataclass(frozen=True)
class Start:
    """Where a search begins: measured and simulated once, since it would not come out the same again."""

    device: Device
    guesses: dict[str, float]
    """By mode."""


@dataclass
class Searched:
    """One search of a file."""

    start: Start | None = None
    found: dict[str, Any] = field(default_factory=dict)
    """By mode, what it came to, as `Found.told` gives it. Modes that were searched in another call are there, too."""
    ran: dict[str, Any] = field(default_factory=dict)
    """What ran it last, and when."""

    @staticmethod
    def name(search: str) -> str:
        """What probes are kept with, for the search that they were first run for."""
        return hashlib.sha256(search.encode()).hexdigest()[:16]


class ProbeFile:
    """One line of JSON for each probe, written when it is done: a search that was ended goes on where it was.

    Where it began is a line, too, and what it came to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._told: dict[str, dict[str, Any]] = {}
        self.searches: dict[str, Searched] = {}
        """By what makes each another one."""
        for number, line in enumerate(_text(path).splitlines(), 1):
            try:
                row = json.loads(line)
                if "search" in row:
                    self._search(row)
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
        known = self.searches.get(search)
        return None if known is None else known.start

    def begin(self, search: str, start: Start, **ran: Any) -> None:
        self._add_search({"search": search, **asdict(start), "ran": ran})

    def end(self, search: str, found: dict[str, Any], **ran: Any) -> None:
        """What it came to, where that is not what it did before."""
        known = self.searches[search].found if search in self.searches else {}
        if known | found != known:
            self._add_search({"search": search, "found": found, "ran": ran})

    def _add_search(self, row: dict[str, Any]) -> None:
        self._search(row)
        self._write(row)

    def _search(self, row: dict[str, Any]) -> None:
        known = self.searches.setdefault(row["search"], Searched())
        known.ran = row.get("ran") or known.ran  # which files of earlier versions do not tell
        if "device" in row:
            known.start = Start(Device.of(row["device"]), row["guesses"])
        known.found |= row.get("found", {})

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
