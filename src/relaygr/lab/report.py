"""One page from result files: how much longer, how much more, under which conditions, and how that was measured."""

import html
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from relaygr.errors import InvalidInput
from relaygr.lab.figures import Chart, against, bars, over_time
from relaygr.lab.outcome import Moment
from relaygr.lab.outputs import checked_folder
from relaygr.lab.probe_file import ProbeFile

__all__ = ["Results", "load_results", "write_report"]

RELAY: Final = "relay+host+extend"


@dataclass
class Results:
    """What was measured: tables of headlines, and probes."""

    tables: list[dict[str, Any]] = field(default_factory=list)
    probes: list[dict[str, Any]] = field(default_factory=list)


def load_results(paths: Sequence[Path]) -> Results:
    """From files of probes (.jsonl) and of headlines (.json). Raises InvalidInput for others."""
    found = Results()
    for path in paths:
        if not path.exists():
            raise InvalidInput("results", f"{path} does not exist")
        if path.suffix == ".jsonl":
            probes = list(ProbeFile(path))
            if not probes:
                raise InvalidInput("results", f"{path} has no probes in it")
            found.probes += probes
            continue
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            table["shapes"], table["details"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            known = "probes of relaygr lab slo or length (.jsonl), or a headline (.json)"
            raise InvalidInput("results", f"{path} is neither of what is reported on: {known}") from error
        found.tables.append(table)
    return found


def write_report(results: Results, out: Path) -> Path:
    """The page, `report.html`, which needs nothing else; and its figures as PNG beside it."""
    checked_folder("out", out)
    sections = [_headline(table) for table in results.tables]
    rows = [name for table in results.tables for name in table["details"]]
    order = {name: place for place, name in enumerate(rows)}
    groups = sorted(_grouped(results.probes).items(), key=lambda group: order.get(group[0], len(order)))
    for name, probes in groups:
        charts = _charts(name, probes)
        for chart in charts:
            chart.png(out)
        figures = "".join(f"<figure>{chart.svg()}</figure>" for chart in charts)
        sections.append(f"<h2>{html.escape(name)}</h2>{_conditions(probes)}{figures}{_modes_table(probes)}")
    sections += [_ran(table) for table in results.tables]
    path = out / "report.html"
    path.write_text(_PAGE.replace("{{sections}}", "\n".join(sections)), encoding="utf-8")
    return path


def _headline(table: Mapping[str, Any]) -> str:
    heads = (
        "model",
        "what",
        "behaviours",
        "budgets, ms",
        "reuse",
        "full alone",
        "against full",
        "against cache",
        "P99, ms",
    )
    lines = []
    for name, detail in table["details"].items():
        row = detail["row"]
        ratio = row["length_ratio"] if detail["kind"] == "length" else row["throughput_ratio"]
        what = "longest history" if detail["kind"] == "length" else "requests a second"
        lines.append(
            (
                detail["shape"], f"{what}, {detail['traffic']} ({name})", f"{row['n'] or 0:,}",
                "{:g} / {:g}".format(*row["budgets_ms"]), _number(row["reuse"], ".2f"),
                _number(row["full_share"], ".0%"), _times(ratio["full"]), _times(ratio["cache"]),
                _number(row["p99_ms"], ".1f"),
            )
        )  # fmt: skip
    told = (
        "Ratios of the whole relay over the same engine in mode full, and in mode cache, on the same device: of the "
        "highest rate, or the longest history, at which P99 of ranking and pipeline keep to the budgets and 99 of 100 "
        "requests are answered. “full alone” is the share of the ranking budget that a rank in full takes by itself; "
        "a dash: not measured, or one of the two holds at no rate."
    )
    where = html.escape(str(table["machine"].get("gpu") or table["machine"].get("cpu")))
    return f"<h2>Headline, {where}</h2><p>{told}</p>{_table(heads, lines)}"


def _grouped(probes: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """By the row they were run for, or by the search and all that stays the same in one.

    They are named by their users and budgets, and by what else tells groups apart, or else by a number.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in probes:
        groups.setdefault(row.get("row") or _same(row), []).append(row)
    others = [_told_apart(rows) for rows in groups.values() if "row" not in rows[0]]
    differ = [len(set(column)) > 1 for column in zip(*others, strict=True)]
    named: dict[str, list[dict[str, Any]]] = {}
    for rows in groups.values():
        name = rows[0].get("row")
        if name is None:
            more = (part for part, differs in zip(_told_apart(rows), differ, strict=True) if differs and part)
            name = ", ".join((_common(rows[0]["probe"]), *more))
        count = sum(each == name or each.startswith(f"{name} (") for each in named)
        named[f"{name} ({count + 1})" if count else name] = rows
    return named


def _same(row: Mapping[str, Any]) -> str:
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


def _told_apart(probes: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """What else a group is known by: its length where it has one, candidates, stages and engine."""
    load, lengths = probes[0]["probe"]["workload"], {row["probe"]["workload"]["lengths"] for row in probes}
    (length,) = lengths if len(lengths) == 1 else ("",)
    return (
        f"{length} behaviours" if length.isdigit() else "",
        f"{load['candidates']:,} candidates",
        f"stages of {load['retrieval_ms']:g} and {load['pre_processing_ms']:g} ms",
        probes[0]["probe"].get("engine", ""),
    )


def _charts(name: str, probes: Sequence[dict[str, Any]]) -> list[Chart]:
    slug = "".join(letter if letter.isalnum() else "-" for letter in name)
    lengths = [
        float(row["probe"]["workload"]["lengths"]) for row in probes if row["probe"]["workload"]["lengths"].isdigit()
    ]
    by_length = len(set(lengths)) > 1
    values = lengths if by_length else [row["probe"]["workload"]["rate"] for row in probes]
    what = "behaviours" if by_length else "requests a second"
    budget = probes[0]["probe"]["budgets"]["ranking_ms"]
    charts = [against(f"{slug}-p99", f"{name}: P99 against {what}", probes, what, values, budget)]
    best = _best(probes)
    charts.append(
        bars(f"{slug}-paths", f"{name}: paths taken", {mode: row["told"]["paths"] for mode, (row, _) in best.items()})
    )
    relay, _ = best.get(RELAY, ({}, ""))
    if relay.get("moments"):
        load = relay["probe"]["workload"]
        title = f"{name}: the relay at {load['rate']:g}/s of {load['lengths']}"
        charts.append(over_time(f"{slug}-time", title, [Moment(*each) for each in relay["moments"]]))
    return charts


def _best(probes: Sequence[dict[str, Any]]) -> dict[str, tuple[dict[str, Any], str]]:
    """Of each mode the probe that went furthest, and how often the mode held there: where that was twice, and as often
    as not, as a search has it; else where it was tried once; else of all."""
    tried = Counter(map(_where, probes))
    held = Counter(_where(row) for row in probes if row["told"]["within budgets"])

    def reach(row: dict[str, Any]) -> tuple[int, float, float, bool]:
        where = _where(row)
        sure = 2 if held[where] >= max(2, tried[where] / 2) else int(held[where] == tried[where])
        return sure, *where[1:], row["told"]["within budgets"]

    best: dict[str, dict[str, Any]] = {}
    for row in probes:
        mode = row["probe"]["mode"]
        if mode not in best or reach(row) > reach(best[mode]):
            best[mode] = row
    return {mode: (row, f"{held[_where(row)]} of {tried[_where(row)]}") for mode, row in best.items()}


def _where(row: Mapping[str, Any]) -> tuple[str, float, float]:
    load = row["probe"]["workload"]
    return row["probe"]["mode"], float(load["lengths"]) if load["lengths"].isdigit() else 0.0, load["rate"]


def _conditions(probes: Sequence[dict[str, Any]]) -> str:
    load, budgets = probes[0]["probe"]["workload"], probes[0]["probe"]["budgets"]
    reuse = f" (reuse {load['reuse']:g})" if load["profile"] == "reuse" else ""
    sources = probes[0].get("traffic", {}).get("sources")
    back = f"as {load['profile']} says{reuse}" if "recorded" not in load else "as they were recorded"
    if sources is not None:
        users = sources.get("users") or sources["arrivals"]  # as it was called in earlier files
        back += f" ({users}); lengths: {sources['lengths']}"
    if probes[0].get("traffic", {}).get("hybrid"):
        back += "; a hybrid of both, which nobody has seen together"
    engine = f"; served by {probes[0]['probe']['engine']}" if "engine" in probes[0]["probe"] else ""
    told = (
        f"Budgets {budgets['ranking_ms']:g} ms for ranking and {budgets['pipeline_ms']:g} ms in all; retrieval and "
        f"pre-processing take {load['retrieval_ms']:g} and {load['pre_processing_ms']:g} ms in the middle, "
        f"{load['stage_spread']:g} times that at P99; {load['candidates']:,} candidates; users come back "
        f"{back}; arrivals: {load['arrivals']}{engine}. A point is one probe, filled where the budgets "
        "held."
    )
    return f"<p>{html.escape(told)}</p>"


def _modes_table(probes: Sequence[dict[str, Any]]) -> str:
    heads = (
        "mode", "went furthest at", "held", "failed (95%)", "ranking P50 / P99, ms", "reuse", "device busy",
        "device s per 1,000", "signals: precision / recall", "steps, ms",
    )  # fmt: skip
    lines = []
    for mode, (row, held) in _best(probes).items():
        told, load = row["told"], row["probe"]["workload"]
        low, high = told["failed, 95%"]
        lines.append(
            (
                mode, f"{load['rate']:g}/s of {load['lengths']}", held,
                f"{told['failed']:.1%} ({low:.1%}–{high:.1%})",
                f"{_number(told['ranking P50'], '.1f')} / {_number(told['ranking P99'], '.1f')}",
                f"{told['reuse']:.2f}", f"{told['device busy']:.0%}", f"{1000 / load['rate']:.1f}",
                f"{_number(told['trigger precision'], '.0%')} / {_number(told['trigger recall'], '.0%')}",
                f"{row['probe']['tuning']['step_ms']:.3g}",
            )
        )  # fmt: skip
    return _table(heads, lines)


def _ran(table: Mapping[str, Any]) -> str:
    machine = ", ".join(f"{name}: {value}" for name, value in table["machine"].items() if value is not None)
    lines = []
    for name, detail in table["details"].items():
        off = [
            f"{mode} {guess / detail['found'][mode] - 1:+.0%}"
            for mode, guess in detail["simulated"].items()
            if detail["found"].get(mode)
        ]
        oracle = detail.get("oracle") or {}
        checked = f"{oracle['difference']:.2g} of {oracle['allowed']:.2g} allowed" if oracle.get("allowed") else "–"
        lines.append((name, ", ".join(off) or "–", checked, str(oracle.get("samples", 0))))
    heads = ("row", "the simulator's error", "largest difference of scores", "answers checked")
    commit = html.escape(f"Commit {table['commit']}. {machine}.")
    return (
        f"<h2>What ran</h2><p>{commit}</p>{_table(heads, lines)}"
        "<p>One engine in one process, no network: latency counts from when a request was to be sent. Every mode runs "
        "the same kernels, graphs and batching on the same device. Random weights; histories are random items.</p>"
    )


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{html.escape(head)}</th>" for head in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f"<div class=wide><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


_PAGE: Final = """<!doctype html>
<html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width">
<title>RelayGR: the relay against the same engine without it</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1080px; margin: 2em auto; padding: 0 1.2em }
h1 { font-size: 1.7em; margin-bottom: .2em }
h2 { font-size: 1.2em; margin-top: 2.2em; border-top: 1px solid #ddd; padding-top: 1em }
table { border-collapse: collapse; font-size: 13px }
th { text-align: left; font-weight: 600; border-bottom: 2px solid #1f6f8b }
th, td { padding: .35em .8em .35em 0; vertical-align: top }
tbody tr { border-bottom: 1px solid #eee }
.wide { overflow-x: auto }
figure { display: inline-block; width: 31em; margin: .6em 1.2em .6em 0; max-width: 100%; vertical-align: top }
figure svg { width: 100%; height: auto }
p { max-width: 72ch }
</style></head><body>
<h1>RelayGR: the relay against the same engine without it</h1>
{{sections}}
</body></html>
"""
