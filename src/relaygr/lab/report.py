"""One page from result files: how much longer, how much more, under which conditions, and how that was measured."""

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from relaygr.errors import InvalidInput
from relaygr.lab.figures import Chart, against, bars, over_time
from relaygr.lab.found import UNCONFIRMED, Found, shown_lengths, shown_value
from relaygr.lab.outcome import Moment
from relaygr.lab.outputs import checked_folder
from relaygr.lab.probe_file import ProbeFile, Searched
from relaygr.lab.searched import Group, grouped
from relaygr.serving.modes import Mode

__all__ = ["Results", "load_results", "write_report"]

_FIGURES: Final = re.compile(r'<meta name=figures content="([^"]*)">')
_OURS: Final = re.compile(r"[\w-]+-(?:p99|paths|time)\.png")


_COLUMNS: Final = (
    "At the limit of each mode that was searched; the others were measured at the relay's, once. “reuse”: the share of "
    "requests for which an earlier one had left a prefix. “device-seconds”: for how long the device was busy; a dash "
    "where the probe was ended early. “precision”: the share of signals sent for ranks that computing in full would "
    "have made late; “recall”: the share of such ranks that a signal was sent for."
)


@dataclass
class Results:
    """What was measured: tables of headlines, and probes with the searches they were made in."""

    tables: list[dict[str, Any]] = field(default_factory=list)
    probes: list[dict[str, Any]] = field(default_factory=list)
    searches: dict[str, Searched] = field(default_factory=dict)
    """By what their probes are kept with."""


def load_results(paths: Sequence[Path]) -> Results:
    """From files of probes (.jsonl) and of headlines (.json). Raises InvalidInput for others."""
    found = Results()
    for path in paths:
        if not path.exists():
            raise InvalidInput("results", f"{path} does not exist")
        if path.suffix == ".jsonl":
            file = ProbeFile(path)
            probes = list(file)
            if not probes:
                raise InvalidInput("results", f"{path} has no probes in it")
            found.probes += probes
            found.searches |= {Searched.name(search): each for search, each in file.searches.items()}
            continue
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            table["shapes"], table["details"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            known = "probes of relaygr lab slo or length (.jsonl), or a headline (.json)"
            raise InvalidInput("results", f"{path} is neither of what is reported on: {known}") from error
        found.tables.append(table)
    return found


def write_report(results: Results, out: Path) -> list[Path]:
    """The page, `report.html`, which needs nothing else, and its figures as PNG beside it: where they are.

    Figures of the page that was there before, by what it says of itself, are removed.
    """
    checked_folder("out", out)
    page = out / "report.html"
    for stale in _figures_of(page):
        stale.unlink(missing_ok=True)
    sections = [_headline(table) for table in results.tables]
    pngs: list[Path] = []
    for group in grouped(results.probes, results.searches, results.tables):
        charts = _charts(group)
        pngs += [chart.png(out) for chart in charts]
        figures = "".join(f"<figure>{chart.svg()}</figure>" for chart in charts)
        told = f"{_answer(group)}{_conditions(group)}{figures}{_modes_table(group)}"
        sections.append(f"<h2>{html.escape(group.name)}</h2>{told}")
    sections += [_ran(table) for table in results.tables]
    named = html.escape(" ".join(path.name for path in pngs))
    filled = _PAGE.replace("{{figures}}", named).replace("{{sections}}", "\n".join(sections))
    page.write_text(filled, encoding="utf-8")
    return [page, *pngs]


def _figures_of(page: Path) -> list[Path]:
    """Those that a page was written with."""
    text = page.read_text(encoding="utf-8", errors="replace") if page.is_file() else ""
    named = _FIGURES.search(text)
    names = html.unescape(named[1]).split() if named else []
    return [page.parent / name for name in names if _OURS.fullmatch(name)]


def _headline(table: Mapping[str, Any]) -> str:
    heads = (
        "model",
        "what",
        "behaviours",
        "budgets, ms",
        "the relay's reuse",
        "full alone",
        "against full",
        "against cache",
        "the relay's ranking P99, ms",
    )
    lines = []
    for name, detail in table["details"].items():
        row = detail["row"]
        ratio = row["length_ratio"] if detail["kind"] == "length" else row["throughput_ratio"]
        what = "longest history" if detail["kind"] == "length" else "requests a second"
        lines.append(
            (
                detail["shape"], f"{what}, {detail['traffic']} ({name})", f"{row['n'] or 0:,}",
                "{:g} / {:g}".format(*row["budgets_ms"]), _number(row["reuse"], ".0%"),
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


def _answer(group: Group) -> str:
    """What the search came to, in a sentence and a table."""
    found, by_length = group.found, group.kind == "length"
    unit = "behaviours" if by_length else "requests a second"
    relay = found.modes.get(Mode.RELAY_HOST_EXTEND)
    said = ""
    if relay is not None and relay.value is not None:
        ratios = [(mode, found.shown_ratio(mode)) for mode in (Mode.FULL, Mode.CACHE)]
        of = " and ".join(f"{ratio} what {mode} did" for mode, ratio in ratios if ratio)
        said = f"The whole relay held {relay.shown} {unit}" + (f": {of}." if of else ".")
    elif relay is not None:
        said = "The whole relay held nowhere that it was tried, or not again."
    heads = ("mode", f"{'longest' if by_length else 'highest'} that held, {unit}", "failed next at",
             "the relay holds", "the simulator had said")  # fmt: skip
    lines = []
    for mode, limit in found.modes.items():
        guess = group.simulated.get(mode)
        off = f" ({guess / limit.value - 1:+.0%})" if guess and limit.value else ""
        ratio = "" if mode is Mode.RELAY_HOST_EXTEND else found.shown_ratio(mode) or "–"
        lines.append(
            (mode.value, limit.shown, limit.shown_failed, ratio, "–" if guess is None else shown_value(guess) + off)
        )
    return f"<p class=answer>{html.escape(said)}</p>{_table(heads, lines)}<p>{html.escape(_notes(found))}</p>"


def _notes(found: Found) -> str:
    limits = found.modes.values()
    notes = ["In brackets: what the ratio lies between, if each limit does between what held and what failed next."]
    if any(limit.value is not None and not limit.confirmed for limit in limits):
        notes.append(f"{UNCONFIRMED}: held once, not confirmed by another probe.")
    if any(limit.value is None for limit in limits):
        notes.append("none: nothing that was tried held, and held again.")
    if any(limit.failed is None for limit in limits):
        notes.append("Where nothing is said to have failed next, nothing higher was seen to.")
    return " ".join(notes)


def _charts(group: Group) -> list[Chart]:
    name, probes, by_length = group.name, group.probes, group.kind == "length"
    slug = "".join(letter if letter.isalnum() else "-" for letter in name)
    what = "behaviours" if by_length else "requests a second"
    budget = probes[0]["probe"]["budgets"]["ranking_ms"]
    values = [group.value(row) for row in probes]
    charts = [against(f"{slug}-p99", f"{name}: P99 against {what}", probes, what, values, budget)]
    best = _best(group)
    mixes = {
        f"{mode}{'' if row['told']['within budgets'] else ', fails'}": row["told"]["paths"]
        for mode, (row, _) in best.items()
    }
    if mixes:
        charts.append(bars(f"{slug}-paths", f"{name}: paths taken, each mode as in the table below", mixes))
    relay, _ = best.get(Mode.RELAY_HOST_EXTEND, ({}, []))
    if relay.get("moments"):
        verdict = "" if relay["told"]["within budgets"] else ", where it fails"
        title = f"{name}: the relay at {_sent(relay)}{verdict}"
        charts.append(over_time(f"{slug}-time", title, [Moment(*each) for each in relay["moments"]]))
    return charts


def _best(group: Group) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """By mode, those that were searched first: the probe to tell of, and all that were made there."""
    modes = dict.fromkeys([*group.found.modes, *(row["probe"]["mode"] for row in group.probes)])
    shown = {str(mode): group.shown(mode) for mode in modes}
    return {mode: told for mode, told in shown.items() if told is not None}


def _sent(row: Mapping[str, Any]) -> str:
    load = row["probe"]["workload"]
    return f"{load['rate']:g}/s of {shown_lengths(load['lengths'])}"


def _conditions(group: Group) -> str:
    probes = group.probes
    load, budgets = probes[0]["probe"]["workload"], probes[0]["probe"]["budgets"]
    reuse = f" (reuse {load['reuse']:g})" if load["profile"] == "reuse" else ""
    sources = probes[0].get("traffic", {}).get("sources")
    back = f"as {load['profile']} says{reuse}" if "recorded" not in load else "as they were recorded"
    if sources is not None:
        users = sources.get("users") or sources["arrivals"]  # as it was called in earlier files
        back += f" ({users}); lengths: {sources['lengths']}"
    if probes[0].get("traffic", {}).get("hybrid"):
        back += "; a hybrid of both, which nobody has seen together"
    served = f" Served by {group.served}." if group.served else ""
    ran = f" Ran: {group.ran}." if group.ran else ""
    told = (
        f"Budgets {budgets['ranking_ms']:g} ms for ranking and {budgets['pipeline_ms']:g} ms in all; retrieval and "
        f"pre-processing take {load['retrieval_ms']:g} and {load['pre_processing_ms']:g} ms in the middle, "
        f"{load['stage_spread']:g} times that at P99; {load['candidates']:,} candidates; users come back "
        f"{back}; arrivals: {load['arrivals']}.{served}{ran} A point of the first chart is one probe, filled where "
        "it held, and set aside a little by its mode; one that answered nothing has none."
    )
    return f"<p>{html.escape(told)}</p>"


def _modes_table(group: Group) -> str:
    heads = (
        "mode", "at", "probes there that held", "failed (95%)", "ranking P50 / P99, ms", "reuse", "device busy",
        "device-seconds per 1,000 requests", "signals: precision / recall", "appends in steps of, ms",
    )  # fmt: skip
    lines = []
    for mode, (row, there) in _best(group).items():
        told = row["told"]
        low, high = told["failed, 95%"]
        held = sum(each["told"]["within budgets"] for each in there)
        searched = Mode(mode) in group.found.modes
        spent = None if told["cut short"] else 1000 * told["device busy"] / row["probe"]["workload"]["rate"]
        lines.append(
            (
                mode, ("" if held or not searched else "held nowhere; at ") + _sent(row), f"{held} of {len(there)}",
                f"{told['failed']:.1%} ({low:.1%} – {high:.1%})",
                f"{_number(told['ranking P50'], '.1f')} / {_number(told['ranking P99'], '.1f')}",
                f"{told['reuse']:.0%}", f"{told['device busy']:.0%}", _number(spent, ".2f"),
                f"{_number(told['trigger precision'], '.0%')} / {_number(told['trigger recall'], '.0%')}",
                f"{row['probe']['tuning']['step_ms']:.3g}",
            )
        )  # fmt: skip
    return _table(heads, lines) + f"<p>{_COLUMNS}</p>"


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
<meta name=figures content="{{figures}}">
<title>RelayGR: the relay against the same engine without it</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1080px; margin: 2em auto; padding: 0 1.2em }
h1 { font-size: 1.7em; margin-bottom: .2em }
h2 { font-size: 1.2em; margin-top: 2.2em; border-top: 1px solid #ddd; padding-top: 1em }
table { border-collapse: collapse; font-size: 13px }
th { text-align: left; font-weight: 600; border-bottom: 2px solid #1f6f8b }
th, td { padding: .35em 1.1em .35em 0; vertical-align: top }
td { white-space: nowrap }
.answer { font-size: 1.1em; font-weight: 600 }
tbody tr { border-bottom: 1px solid #eee }
.wide { overflow-x: auto }
figure { width: 46em; margin: .6em 0; max-width: 100% }
figure svg { width: 100%; height: auto }
p { max-width: 72ch }
</style></head><body>
<h1>RelayGR: the relay against the same engine without it</h1>
{{sections}}
</body></html>
"""
