"""Searches as result files have them: which probes were of one, what it came to, and what ran it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from relaygr.lab.found import Found, Limit, shown_lengths
from relaygr.lab.probe_file import Searched
from relaygr.serving.modes import Mode

__all__ = ["Group", "grouped"]

_MEMORY: Final = " of memory for prefixes, on the device and on the host"

Row = dict[str, Any]
"""A probe, as a file keeps it."""


@dataclass(frozen=True)
class Group:
    """Probes of one search, or of a headline's row."""

    name: str
    probes: list[Row]
    kind: Literal["rate", "length"]
    found: Found
    """Of the modes that were searched; others were measured at the relay's limit."""
    simulated: dict[Mode, float]
    """By mode: where the simulator had seen the limit."""
    served: str
    ran: str
    """Version, commit, when, and on what: as far as the files tell it."""

    def value(self, row: Row) -> float:
        return _value(row, self.kind)

    def shown(self, mode: str) -> tuple[Row, list[Row]] | None:
        """Of a mode: the probe that tells most, and all with the same rate and lengths. That is the last that held at
        the limit; for a mode that held nowhere, one of the lowest that it was tried at; for one that was not searched,
        one at the relay's limit."""
        mine = [row for row in self.probes if row["probe"]["mode"] == mode]
        searched = mode in self.found.modes
        limit = self.found.limits.get(Mode(mode) if searched else Mode.RELAY_HOST_EXTEND)
        there = [row for row in mine if limit is None or self.value(row) == limit]
        if not there and not searched:
            there = mine
        if not there:
            return None
        best = max(there, key=lambda row: (-self.value(row), row["told"]["within budgets"], there.index(row)))
        return best, [row for row in there if _where(row) == _where(best)]


def grouped(
    probes: Sequence[Row], searches: Mapping[str, Searched], tables: Sequence[Mapping[str, Any]] = ()
) -> list[Group]:
    """By the row they were run for, or by the search and all that stays the same in one.

    Rows of headlines come in their order. Others are named by their users and budgets, and by what else tells groups
    apart, or else by a number. `searches` by what their probes are kept with.
    """
    details = {name: (table, detail) for table in tables for name, detail in table["details"].items()}
    order = {name: place for place, name in enumerate(details)}
    groups = sorted(_named(probes).items(), key=lambda group: order.get(group[0], len(order)))
    return [
        _of_headline(name, rows, *details[name])
        if name in details and "row" in rows[0]
        else _of_search(name, rows, searches.get(rows[0].get("searched", ""), Searched()))
        for name, rows in groups
    ]


def _of_headline(name: str, rows: list[Row], table: Mapping[str, Any], detail: Mapping[str, Any]) -> Group:
    kind: Literal["rate", "length"] = "length" if detail["kind"] == "length" else "rate"
    limits = {}
    for mode, value in detail["found"].items():
        there = _by_value(rows, mode, kind)
        confirmed = sum(row["told"]["within budgets"] for row in there.get(value, ())) > 1
        limits[Mode(mode)] = Limit(value, confirmed, _failed(there, value))
    memory = detail.get("memory")
    served = detail["shape"] + (f", {memory[0]} and {memory[1]}{_MEMORY}" if memory else "")
    commits = [row.get("commit") or detail.get("commit") or table["commit"] for row in rows]
    ran = _ran({"machine": table["machine"]}, commits)
    guesses = {Mode(mode): guess for mode, guess in detail["simulated"].items()}
    return Group(name, rows, kind, Found(limits), guesses, served, ran)


def _of_search(name: str, rows: list[Row], searched: Searched) -> Group:
    lengths = {row["probe"]["workload"]["lengths"] for row in rows}
    kind: Literal["rate", "length"] = "length" if len(lengths) > 1 and all(map(str.isdigit, lengths)) else "rate"
    guesses = {} if searched.start is None else searched.start.guesses
    modes = guesses or dict.fromkeys(row["probe"]["mode"] for row in rows if not row.get("other"))
    limits = {Mode(mode): _limit(_by_value(rows, mode, kind)) for mode in modes}
    found = Found(limits | Found.of(searched.found).modes)  # of those that did not come to an end, what is seen so far
    simulated = {Mode(mode): guess for mode, guess in guesses.items()}
    engine = rows[0]["probe"].get("engine", "")
    served = f"{engine}{_MEMORY}" if engine else ""
    return Group(name, rows, kind, found, simulated, served, _ran(searched.ran, [row.get("commit") for row in rows]))


def _ran(ran: Mapping[str, Any], commits: Iterable[str | None]) -> str:
    known = dict.fromkeys(commit[:7] for commit in commits if commit)
    machine = ran.get("machine", {})
    where = machine.get("gpu") or machine.get("cpu")
    cores = f", {machine['cores']} cores" if "cores" in machine else ""
    parts = (
        f"relaygr {ran['version']}" if "version" in ran else "",
        f"commit {', '.join(known)}" if known else "",
        f"on {where}{cores}" if where else "",
        f"ended {ran['date'][:10]}" if "date" in ran else "",
    )
    return ", ".join(filter(None, parts))


def _value(row: Row, kind: str) -> float:
    load = row["probe"]["workload"]
    return float(load["lengths"]) if kind == "length" else float(load["rate"])


def _by_value(rows: Sequence[Row], mode: str, kind: str) -> dict[float, list[Row]]:
    there: dict[float, list[Row]] = {}
    for row in rows:
        if row["probe"]["mode"] == mode:
            there.setdefault(_value(row, kind), []).append(row)
    return there


def _limit(there: Mapping[float, Sequence[Row]]) -> Limit:
    """What a search that was not told to its end has come to: where the last probe held, confirmed before not.

    A probe that fails by what may be luck is followed by another, which counts, and one that held by another that
    confirms it, or does not.
    """
    held = {
        value: sum(row["told"]["within budgets"] for row in rows)
        for value, rows in there.items()
        if rows[-1]["told"]["within budgets"]
    }
    value = max(held, key=lambda value: (held[value] > 1, value), default=None)
    return Limit(value, value is not None and held[value] > 1, _failed(there, value))


def _failed(there: Mapping[float, Sequence[Row]], limit: float | None) -> float | None:
    above = (value for value, rows in there.items() if not rows[-1]["told"]["within budgets"] and value > (limit or 0))
    return min(above, default=None)


def _where(row: Row) -> tuple[str, float]:
    load = row["probe"]["workload"]
    return load["lengths"], load["rate"]


def _named(probes: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in probes:
        groups.setdefault(row.get("row") or _same(row), []).append(row)
    others = [_told_apart(rows) for rows in groups.values() if "row" not in rows[0]]
    differ = [len(set(column)) > 1 for column in zip(*others, strict=True)]
    named: dict[str, list[Row]] = {}
    for rows in groups.values():
        name = rows[0].get("row")
        if name is None:
            more = (part for part, differs in zip(_told_apart(rows), differ, strict=True) if differs and part)
            name = ", ".join((_common(rows[0]["probe"]), *more))
        count = sum(each == name or each.startswith(f"{name} (") for each in named)
        named[f"{name} ({count + 1})" if count else name] = rows
    return named


def _same(row: Row) -> str:
    """What all probes of a search have in common: all but the mode, its tuning, and what is searched or drawn."""
    probe, load = row["probe"], row["probe"]["workload"]
    searched = ("rate", "seconds", "seed", *(("lengths",) if load["lengths"].isdigit() else ()))
    told = {name: value for name, value in load.items() if name not in searched}
    return json.dumps([told, probe["budgets"], probe.get("engine"), row.get("searched")], sort_keys=True)


def _common(probe: Mapping[str, Any]) -> str:
    """How users come back, by a profile or as in a recording, which its digest tells from others; whose lengths, where
    those are not a number, which may be what was searched; and the budgets."""
    load, budgets = probe["workload"], probe["budgets"]
    back = f"recorded {load['recorded'][:6]}" if "recorded" in load else str(load["profile"])
    store = f"{load['lengths']} {load['stored'][:6]}" if "stored" in load else load["lengths"]
    lengths = "" if load["lengths"].isdigit() else f", {store}"
    return f"{back}{lengths}, {budgets['ranking_ms']:g} / {budgets['pipeline_ms']:g} ms"


def _told_apart(probes: Sequence[Row]) -> tuple[str, ...]:
    """What else a group is known by: its length where it has one, candidates, stages and engine."""
    load, lengths = probes[0]["probe"]["workload"], {row["probe"]["workload"]["lengths"] for row in probes}
    (length,) = lengths if len(lengths) == 1 else ("",)
    return (
        shown_lengths(length) if length.isdigit() else "",
        f"{load['candidates']:,} candidates",
        f"stages of {load['retrieval_ms']:g} and {load['pre_processing_ms']:g} ms",
        probes[0]["probe"].get("engine", ""),
    )
