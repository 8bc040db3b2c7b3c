"""Tables and pictures of the documents, made from results: `python benchmarks/tables.py` writes them in place.

A table stands between <!-- NAME --> and <!-- /NAME -->; the tests check that none was edited by hand.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import result_of
from headline_tables import GPU, MODES, goals, headline, headline_picture, limits, maybe, others

__all__ = ["PICTURES", "TABLES", "written"]

ROOT = Path(__file__).resolve().parent.parent
SHOWN_CALLERS = (1, 16)
LOOP_US = 200
"""What the loop may take of the CPU for a step of 16 users."""
CALLS = ("pre-infer", "rank resident", "rank extended", "rank reloaded", "rank full")


def gpu_calls() -> str:
    """One call at a time through the engine, on a GPU."""
    result = result_of("engine-h200")
    cases = dict.fromkeys((row["shape"], row["n"], row["m"]) for row in result["calls"])
    found = {(row["shape"], row["n"], row["call"]): row for row in result["calls"]}
    lines = [
        f"One {result['machine']['gpu']}, bf16, commit {result['commit'][:12]}, one call at a time, medians of "
        f"{result['inputs']['rounds']}: "
        "milliseconds from the caller's side, and in brackets on the device.",
        "",
        "| model | behaviours | candidates | " + " | ".join(CALLS) + " |",
        "|---|---|---|" + "---|" * len(CALLS),
    ]
    for shape, n, m in cases:
        cells = []
        for call in CALLS:
            row = found[shape, n, call]
            cells.append(f"{row['ms']:.2f} ({row['device_ms']:.2f})")
        lines.append(f"| `{shape}` | {n:,} | {m:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def gpu_targets() -> str:
    """What was aimed for, and whether it was reached."""
    result = result_of("engine-h200")
    lines = ["| call | target | on the device | from the caller's side |", "|---|---|---|---|"]
    for row in result["calls"]:
        if "target_ms" in row:
            reached = [("reached" if row[key] else "missed") for key in ("reached_on_device", "reached")]
            lines.append(
                f"| {row['call']}, `{row['shape']}`, {row['n']:,} behaviours | ≤ {row['target_ms']:.2f} ms "
                f"| {row['device_ms']:.2f} ms, {reached[0]} | {row['ms']:.2f} ms, {reached[1]} |"
            )
    for row in result["calls"]:
        if "share_of_link" in row and row["shape"] == "d512" and row["n"] == 8192:
            verdict = "reached" if row["share_of_link"] >= 0.9 else "missed"
            lines.append(
                f"| reload, `d512`, {row['n']:,} behaviours | ≥ 90% of 55 GB/s "
                f"| {row['copy_gb_s']:.1f} GB/s, {verdict} | {row['ms']:.2f} ms with its rank |"
            )
    for row in result["loads"]:
        if (row["mix"], row["callers"]) == ("resident", 16):
            verdict = "reached" if row["loop_cpu_us_per_step"]["all"] < LOOP_US else "missed"
            lines.append(
                f"| the loop, a step of {row['ranks_per_step']:.0f} ranks, `{row['shape']}`, {row['m']:,} candidates "
                f"| < {LOOP_US} µs of CPU | | {_loop_us(row)} µs, {verdict} |"
            )
    return "\n".join(lines)


def gpu_loads() -> str:
    """Closed loops of callers."""
    result = result_of("engine-h200")
    lines = [
        "| model | callers ask for | callers | ranks/s | P50, ms | P99, ms | device busy | loop per step, CPU µs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{row['shape']}`, {row['n']:,} | {row['mix']} | {row['callers']} | {row['requests_per_s']:,.0f} "
        f"| {row['p50_ms']:.2f} | {row['p99_ms']:.2f} | {row['device_busy']:.0%} "
        f"| {_loop_us(row)} |"
        for row in result["loads"]
        if row["callers"] in SHOWN_CALLERS
    ]
    return "\n".join(lines)


def _loop_us(load: dict[str, Any]) -> str:
    """Of a step, and in the best and the worst part of the time."""
    parts = load["loop_cpu_us_per_step_over_time"]
    return f"{load['loop_cpu_us_per_step']['all']:.0f} ({min(parts):.0f} – {max(parts):.0f})"


def waits() -> str:
    """What a step costs the loop, by how long it waited for it and by what was read meanwhile."""
    result = result_of("waits-cpu")
    rows = {(row["wait_ms"], row["candidates"], row["read"]): row for row in result["figures"]["rows"]}
    reads = list(result["inputs"]["read"])
    lines = [
        f"A step of {result['inputs']['callers']} ranks, µs of the loop's CPU, medians of {result['inputs']['rounds']} "
        f"rounds and in brackets the least, on {result['machine']['cores']} cores "
        f"that others use, too; commit {result['commit'][:7]}:",
        "",
        "| steps of | candidates | " + " | ".join(f"reading {read}" for read in reads) + " |",
        "|---|---|" + "---|" * len(reads),
    ]
    for wait_ms, candidates in dict.fromkeys(key[:2] for key in rows):
        found = [rows[wait_ms, candidates, read] for read in reads]
        cells = [f"{row['all_us']:.0f} ({row['least_us']:.0f})" for row in found]
        lines.append(f"| {wait_ms:g} ms | {candidates:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def overload() -> str:
    """Requests answered in time where more come than the device can serve, simulated."""
    figures = result_of("overload-simulated")["figures"]
    before = {(row["mode"], row["times"]): row["answered"] for row in figures["before"]["rows"]}
    lines = ["| of the mode's limit | `full` | `cache` | relay |", "|---|---|---|---|"]
    for times in dict.fromkeys(row["times"] for row in figures["rows"]):
        rows = {row["mode"]: row for row in figures["rows"] if row["times"] == times}
        cells = [
            f"{row['answered']:.0f} of {row['rate']:.0f} ({before[mode, times]:.0f})"
            for mode, row in ((mode, rows[mode]) for mode, _, _ in MODES)
        ]
        lines.append(f"| {times:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def next_items() -> str:
    """MovieLens-1M beside what was published."""
    result = result_of("quality-ml-1m")
    seeds = len(result["inputs"]["seeds"])
    lines = ["| MovieLens-1M, leave one out, length 200 | HR@10 | NDCG@10 | HR@50 | HR@200 |", "|---|---|---|---|---|"]
    for name, suffix in (
        ("RelayGR, `ml-1m`, ties in the order of the file", ""),
        ("ties the other way", "_other_ties"),
    ):
        cells = [
            f"{result[f'{key}{suffix}']:.4f} ± {result[f'{key}{suffix}_std']:.4f}"
            for key in ("hr@10", "ndcg@10", "hr@50", "hr@200")
        ]
        lines.append(f"| {name}, {seeds} seeds | " + " | ".join(cells) + " |")
    for name, figures in result["figures"]["published"].items():
        lines.append(f"| published: {name} | {figures['hr@10']:.4f} | {figures['ndcg@10']:.4f} | | |")
    return "\n".join(lines)


def clicks() -> str:
    """KuaiRand-Pure."""
    result = result_of("quality-kuairand-pure")
    lines = ["| KuaiRand-Pure, by time | AUC | normalized entropy | calibration |", "|---|---|---|---|"]
    for label, name in (("is_click", "click"), ("long_view", "long view"), ("is_like", "like")):
        cells = [
            f"{result[f'{label}_{key}']:.4f} ± {result[f'{label}_{key}_std']:.4f}"
            for key in ("auc", "normalized_entropy", "calibration")
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def length() -> str:
    """Quality and latency by the behaviours read."""
    figures = result_of("length-quality")["figures"]
    groups = {"all": "all", "with_as_many": "with as many", "with_512": "with 512"}
    figures_of = {"AUC": "liked_auc", "AUC within users": "liked_auc_within", "HR@10": "hr@10"}
    heads = [f"{what}, {group}" for what in figures_of for group in groups.values()]
    lines = ["| behaviours read | " + " | ".join(heads) + " | full, ms | by relay, ms |"]
    lines.append("|---" * (len(heads) + 3) + "|")
    for row, times in zip(figures["quality"], figures["latency"], strict=True):
        cells = [f"{row[f'{key} {group}']:.4f}" for key in figures_of.values() for group in groups]
        cells += [f"{times['full_ms']:.1f}", f"{times['relay_ms']:.1f}"]
        lines.append(f"| {row['cut']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def length_gains() -> str:
    """What the longest histories bring over shorter ones."""
    figures = result_of("length-quality")["figures"]
    figures_of = (("AUC", "liked_auc"), ("AUC within users", "liked_auc_within"), ("HR@10", "hr@10"))
    groups = {"all": "all", "with_512": "with 512"}
    columns = {f"{what}, {name}": f"{key} {group}" for what, key in figures_of for group, name in groups.items()}
    lines = ["| 512 behaviours against | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in figures["gains"]:
        cells = [
            f"{row[key]['value']:+.4f} ({row[key]['low']:+.4f} … {row[key]['high']:+.4f})" for key in columns.values()
        ]
        lines.append(f"| {row['over']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def kernel_targets() -> str:
    """What attention was to reach."""
    section = result_of("kernels-h200")["sections"]["targets"]
    lines = ["| shape | TFLOP/s | target | behind 100 large products |", "|---|---|---|---|"]
    for row in section["rows"]:
        found = f"{row['reached_tflops']:.0f}" if row["reached"] else f"**{row['reached_tflops']:.0f}, missed**"
        lines.append(f"| {row['name']} | {found} | {row['target_tflops']} | {row['behind_a_product_tflops']:.0f} |")
    ceilings = section["ceilings"]
    lines += [
        "",
        "Each shape was measured after a second of rest. A large bf16 matrix product ran at "
        f"{ceilings['matrix_tflops']:.0f} TFLOP/s so, and at {ceilings['matrix_sustained_tflops']:.0f} on end, "
        "when the card is at its power limit; the last column is what the shapes reach at those clocks.",
    ]
    return "\n".join(lines)


def ray_paths() -> str:
    """What carries a rank on Ray."""
    result = result_of("ray-paths")
    inputs, figures = result["inputs"], result["figures"]
    lines = [
        f"| path | alone, P50 ms | P99 ms | × plain | {inputs['senders']} at once, ranks/s | × plain | P99 ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in figures.items():
        alone = row["alone_ms"]
        lines.append(
            f"| {name} | {alone['p50']:.2f} | {alone['p99']:.1f} | {row['alone_against_plain']:.2f} "
            f"| {row['ranks_a_second']:,.0f} | {row['rate_against_plain']:.2f} | {row['many_ms']['p99']:.0f} |"
        )
    lines += ["", _about(result)]
    return "\n".join(lines)


def ray_cluster() -> str:
    """Events under load."""
    result = result_of("ray-cluster")
    inputs, figures = result["inputs"], result["figures"]
    lines = [
        "| event | ranks meanwhile | failed | missed | share | of users | keys back after | P99 ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in figures["events"].items():
        back = "" if row["keys_back_s"] is None else f"{row['keys_back_s']:.1f} s"
        lines.append(
            f"| {name} | {row['ranks']:,} | {row['failed']} | {row['missed']} | {row['share_missed']:.1%} "
            f"| {row['users_missed']} | {back} | {row['answered_ms']['p99']:.0f} |"
        )
    lines += [
        "",
        f"{inputs['instances']} instances, {inputs['users']} users, {figures['rate']:g} requests a second; the highest "
        f"rate held was {figures['highest_rate']:g} (P99 below {inputs['held_p99_ms']:g} ms, nothing failed). Of "
        f"{figures['requests']:,} requests {figures['failed']} failed. " + _about(result),
    ]
    return "\n".join(lines)


def _about(result: Any) -> str:
    machine, load = result["machine"], result["inputs"]["load_average"]
    return (
        f"Ray {result['inputs']['ray']} on {machine['cores']} cores ({machine['cpu']}), load average {load:.1f} "
        "at the end; others may have used the machine: compare rows."
    )


def serving() -> str:
    """Gateway, frontend and engine on a CPU."""
    result = result_of("serving-cpu")
    inputs = result["inputs"]
    lines = ["| | measured | aimed at | |", "|---|---|---|---|"]
    for row in result["figures"]["targets"]:
        verdict = {True: "reached", False: "missed", None: ""}[row["reached"]]
        lines.append(f"| {row['what']} | {row['measured']} | {row['target']} | {verdict} |")
    lines += [
        "",
        f"{result['machine']['cores']} cores ({result['machine']['cpu']}) for clients and servers; {inputs['model']}; "
        f"histories of {inputs['length']:,}, {inputs['candidates']} candidates, retrieval of "
        f"{inputs['retrieval_at_least_ms']:g} ms, {inputs['newcomers']:.0%} newcomers; the frontend by itself: "
        f"histories of {inputs['frontend']['history']:,}, a simulated device.",
    ]
    return "\n".join(lines)


def soak() -> str:
    """What a long run with faults came to."""
    result = result_of("soak")
    inputs, figures = result["inputs"], result["figures"]
    answers = ", ".join(f"{count:,} × {status}" for status, count in figures["answers"].items())
    lines = [
        f"{inputs['requests']:,} requests of {inputs['users']} users who come back, {inputs['appends']:.0%} of them "
        f"after something new; {inputs['kills']} instances killed, {inputs['freezes']} frozen, {figures['aborted']:,} "
        f"clients gone before their answer. Answers: {answers}. Of {figures['scores']['looked_at']:,} whose scores "
        f"were compared with the right ones, {figures['scores']['wrong']} were wrong.",
        "",
        "| at the end | |",
        "|---|---|",
        *(f"| {what} | {'yes' if holds else 'NO'} |" for what, holds in figures["holds"].items()),
        "",
        f"Deadlines of {inputs['deadline_ms']:g} ms were overrun by {figures['deadline_overrun_p99_ms']:g} ms at P99; "
        f"the cost model was off by {figures['cost_model_error']:.1%} at the median on the simulated device and by "
        f"{figures['cost_model_error_cpu']:.1%} on the CPU.",
    ]
    return "\n".join(lines)


def sensitivity() -> str:
    """Simulated: the highest rates within the budgets, one condition changed at a time."""
    result = result_of("sensitivity-simulated")
    inputs, rows = result["inputs"], result["figures"]["rows"]
    base = inputs["base"]
    lines = [
        "| condition | | `full`/s | `cache`/s | relay/s | against `full` | against `cache` |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        rates = [maybe(row["rates"][mode], ".1f") for mode in ("full", "cache", "relay")]
        ratios = [maybe(row[f"against_{mode}"], ".2f", "×") for mode in ("full", "cache")]
        lines.append("| " + " | ".join((row["condition"], row["value"], *rates, *ratios)) + " |")
    stages, (ranking, pipeline) = " + ".join(f"{ms:g}" for ms in base["stages_ms"]), inputs["budgets_ms"]
    lines += [
        "",
        f"Base: `d512`, {base['lengths']:,} behaviours, {base['candidates']} candidates, reuse {base['reuse']}, gaps "
        f"of {base['gap_s']:g} s, stages of {stages} ms, budgets {ranking:g} / {pipeline:g} ms, "
        f"{' and '.join(inputs['memory'])} of memory, at {result['commit'][:7]}. Rates are within 7% of the "
        "simulator's limits for one set of arrivals, of 2,000 requests for `full` and 500 for the others, or of two "
        "seconds.",
    ]
    if any(row["condition"] == "model" for row in rows):
        lines[-1] += " Other models: costs in proportion to what their calls of 8,192 behaviours took."
    return "\n".join(lines)


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "headline": lambda: headline(GPU),
        "gpu-calls": gpu_calls,
        "length": length,
        "next-items": next_items,
    },
    "docs/lab.md": {
        "headline": headline,
        "headline-goals": goals,
        "headline-limits": limits,
        "headline-others": others,
        "sensitivity": sensitivity,
    },
    "docs/kernels.md": {"kernel-targets": kernel_targets},
    "docs/engine.md": {"gpu-targets": gpu_targets, "gpu-loads": gpu_loads, "waits": waits, "overload": overload},
    "docs/relay.md": {"serving": serving, "soak": soak},
    "docs/ray.md": {"ray-paths": ray_paths, "ray-cluster": ray_cluster},
    "docs/training.md": {
        "next-items": next_items,
        "clicks": clicks,
        "length": length,
        "length-gains": length_gains,
    },
}
"""By document and by name."""


def written(document: str) -> str:
    """The document with its tables made anew."""
    text = (ROOT / document).read_text()
    for name, table in TABLES[document].items():
        pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{document} has no place for {name}")
        text = pattern.sub(lambda match, table=table: f"{match[1]}{table()}\n{match[2]}", text)  # type: ignore[misc]
    return text


PICTURES: dict[str, Callable[[], str]] = {"docs/headline.svg": headline_picture}


if __name__ == "__main__":
    for each in TABLES:
        (ROOT / each).write_text(written(each))
    for each, picture in PICTURES.items():
        (ROOT / each).write_text(picture())
