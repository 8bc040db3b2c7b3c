"""The headline's tables and its picture, made from the table's file and from the probes behind it."""

import json
from collections.abc import Sequence
from typing import Any

from chart import Bar, Bars, bars
from common import RESULTS, result_of

__all__ = ["GPU", "MODES", "goals", "headline", "headline_picture", "limits", "maybe", "others"]

GPU = {"headline-h200": "One NVIDIA H200, bf16"}
CPU = {
    "headline-cpu": "At small scale on a CPU (`d64`, 2 layers of 64, 64 candidates, float32, stages of 480 ms, "
    "512 + 512 MiB)"
}
MODES = (("full", "full", "c"), ("cache", "cache", "b"), ("relay+host+extend", "relay", "a"))
"""As results name them, as documents do, and in which colour."""
OTHERS = ("truncate", "relay", "relay+host", "always trigger", "never trigger")
GOALS = {
    "half-10": 4.0, "half-20": 4.0, "half-50": 4.0, "refresh-32k": 3.5, "refresh-128k": 5.0,
    "length-10": 3.0, "length-50": 1.6, "length-50-warm": 4.0, "dlrmv3": 1.6,
}  # fmt: skip
"""On the GPU: so many times what `full` holds; and more than `cache` does, in each."""
HALF_STEPS = {"rate": 1.06, "length": 1.04}
"""Of a search: ratios above 1 by less are not told apart from it."""


def headline(files: dict[str, str] = GPU | CPU) -> str:
    """The relay against the same engine without it."""
    return "\n\n".join(f"{what}:\n\n{_rows(file)}" for file, what in files.items())


def _rows(file: str) -> str:
    lines = [
        "| row | model | what | behaviours | budgets, ms | relay's reuse | `full` alone | `full` | `cache` | relay "
        "| against `full` | against `cache` | commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    details, probes = result_of(file)["details"], _searched(file)
    for name, detail in details.items():
        row = detail["row"]
        by_length = detail["kind"] == "length"
        ratio = row["length_ratio"] if by_length else row["throughput_ratio"]
        kind = "longest history" if by_length else "requests a second"
        what_held = f"{kind}, {detail['traffic']}"
        held = [_held(detail, mode) for mode, _, _ in MODES]
        cells = [
            name, f"`{detail['shape']}`", what_held, f"{row['n']:,}" if row["n"] else "–",
            "{:g} / {:g}".format(*row["budgets_ms"]), maybe(row["reuse"], ".2f"),
            maybe(row["full_share"], ".0%"), *held,
            maybe(ratio["full"], ".2f", "×"), maybe(ratio["cache"], ".2f", "×"),
            ", ".join(dict.fromkeys((probe.get("commit") or detail["commit"])[:7] for probe in probes[name])),
        ]  # fmt: skip
        lines.append(_line(cells))
    seen = [
        simulated / detail["found"][mode]
        for detail in details.values()
        for mode, simulated in detail["simulated"].items()
        if detail["found"][mode]
    ]
    error = f"at {min(seen):.0%} to {max(seen):.0%} of what was found"
    lines += ["", f"The simulator had seen these limits {error}."]
    return "\n".join(lines)


def _held(detail: dict[str, Any], mode: str) -> str:
    """What the mode holds in this row: behaviours, or requests a second."""
    return maybe(detail["found"][mode], ",.0f" if detail["kind"] == "length" else ".3g")


def goals() -> str:
    """What was aimed for on the GPU, and whether it was reached."""
    lines = ["| row | goal, of `full` | measured | | of `cache` | |", "|---|---|---|---|---|---|"]
    details = result_of("headline-h200")["details"]
    for name, goal in GOALS.items():
        by_length = details[name]["kind"] == "length"
        ratio = details[name]["row"]["length_ratio" if by_length else "throughput_ratio"]
        full = "reached" if ratio["full"] is not None and ratio["full"] >= goal else "**missed**"
        cache = "reached" if ratio["cache"] is not None and ratio["cache"] > 1 else "**missed**"
        if ratio["cache"] is not None and 1 < ratio["cache"] < HALF_STEPS["length" if by_length else "rate"]:
            cache = "not told apart"
        measured = maybe(ratio["full"], ".2f", "×"), full, maybe(ratio["cache"], ".2f", "×"), cache
        lines.append(_line((name, f"{goal:g}×", *measured)))
    return "\n".join(lines)


def limits() -> str:
    """Every probe at what was found, and of what was tried above it the least, and whatever held once."""
    lines = [
        "| row | mode | limit | requests | failed | ranking P99, ms | device busy | brought back from the host "
        "| sender late at P99, ms | tried above: failed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for file in GPU | CPU:
        probes = _searched(file)
        for name, detail in result_of(file)["details"].items():
            for mode, shown, _ in MODES:
                if detail["found"][mode] is not None:
                    ours = [probe for probe in probes[name] if probe["probe"]["mode"] == mode]
                    shown_mode = shown if shown == "relay" else f"`{shown}`"
                    lines.append(_line((name, shown_mode, *_limit(detail, mode, ours))))
    return "\n".join(lines)


def _limit(detail: dict[str, Any], mode: str, probes: Sequence[dict[str, Any]]) -> list[str]:
    by_value: dict[float, list[dict[str, Any]]] = {}
    for probe in probes:
        by_value.setdefault(_value(detail, probe), []).append(probe["told"])
    found = detail["found"][mode]
    above = sorted(value for value in by_value if value > found)
    worth = [value for value in above if value == above[0] or any(told["within budgets"] for told in by_value[value])]
    there = by_value[found]
    return [
        _held(detail, mode),
        _each([told["requests"] for told in there], ",d"),
        _failed(there),
        _each([told["ranking P99"] for told in there], ".3g"),
        _each([told["device busy"] for told in there], ".0%"),
        _each([told["reloaded"] for told in there], ".0%") if all("reloaded" in told for told in there) else "",
        _each([told["sender late P99"] for told in there], ".2g"),
        "; ".join(f"{value:,g}: {_failed(by_value[value])}" for value in worth),
    ]


def others() -> str:
    """The other modes at the rate that the relay holds, or held before where that is said."""
    lines = [_line(("row", *(f"`{mode}`" for mode in OTHERS))), "|---" * (len(OTHERS) + 1) + "|"]
    for file in GPU | CPU:
        known = {
            (probe["row"], probe["probe"]["mode"]): probe
            for probe in (*_probes(file, "earlier-"), *_probes(file))
            if probe.get("other")
        }
        for name, detail in result_of(file)["details"].items():
            if any((name, mode) in known for mode in OTHERS):
                cells = [_other(detail, known[name, mode]) if (name, mode) in known else "" for mode in OTHERS]
                lines.append(_line([name, *cells]))
    return "\n".join(lines)


def _other(detail: dict[str, Any], probe: dict[str, Any]) -> str:
    told, workload = probe["told"], probe["probe"]["workload"]
    truncated = told["paths"].get("TRUNCATED", 0.0)
    verdict = f"{'holds' if told['within budgets'] else 'fails'}: {told['failed']:.1%} of {told['requests']:,} failed"
    verdict += f", {truncated:.0%} truncated" if truncated else ""
    if (workload["rate"], int(workload["lengths"])) == (detail["found"]["relay+host+extend"], detail["row"]["n"]):
        return verdict
    length = "" if int(workload["lengths"]) == detail["row"]["n"] else f" of {int(workload['lengths']):,}"
    return f"{verdict} (at {workload['rate']:g}{length})"


def _value(detail: dict[str, Any], probe: dict[str, Any]) -> float:
    """What was searched for in this row, as the probe had it."""
    workload = probe["probe"]["workload"]
    return float(workload["lengths"] if detail["kind"] == "length" else workload["rate"])


def _each(values: Sequence[float | None], form: str) -> str:
    return " / ".join(maybe(value, form) for value in values)


def _failed(probes: Sequence[dict[str, Any]]) -> str:
    """Of what was told of each probe."""
    return " / ".join(f"{told['failed']:.1%}{' ✓' if told['within budgets'] else ''}" for told in probes)


def headline_picture() -> str:
    """What each mode holds on the GPU, as many times what `full` holds."""
    groups = []
    for detail in result_of("headline-h200")["details"].values():
        row, found, by_length = detail["row"], detail["found"], detail["kind"] == "length"
        unit = " behaviours" if by_length else " a second"
        held = []
        for mode, name, colour in MODES:
            times = found[mode] / found["full"] if found[mode] and found["full"] else None
            shown = _held(detail, mode) + (unit if found[mode] else "")
            held.append(Bar(name, colour, times, shown + (f", {times:.2f}×" if times and name != "full" else "")))
        what = "longest history" if by_length else f"highest rate, {row['n']:,} behaviours"
        ranking, pipeline = row["budgets_ms"]
        reuse = "" if row["reuse"] is None else f", reuse {row['reuse']:.2f}"
        returning = "nobody returns" if row["reuse"] == 0 else detail["traffic"] + reuse
        groups.append(Bars(f"{detail['shape']}: {what}", f"{ranking:g} / {pipeline:g} ms, {returning}", held))
    about = "Bars: times what full holds in that row. Budgets: ranking / pipeline."
    return bars("What holds within the same budgets, on one NVIDIA H200", about, groups)


def maybe(value: float | None, form: str, unit: str = "") -> str:
    return "none" if value is None else format(value, form) + unit


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _searched(file: str) -> dict[str, list[dict[str, Any]]]:
    """By row: the probes of its search, in their order."""
    by_row: dict[str, list[dict[str, Any]]] = {}
    for probe in _probes(file):
        if not probe.get("other"):
            by_row.setdefault(probe["row"], []).append(probe)
    return by_row


def _probes(file: str, which: str = "") -> list[dict[str, Any]]:
    """Those of the table, or of before; none where there is no such file."""
    path = RESULTS / f"{file}-{which}probes.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
