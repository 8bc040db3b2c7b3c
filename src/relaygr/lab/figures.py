"""Charts of a report, as SVG for its page and as PNG beside it."""

import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from relaygr.errors import InvalidInput
from relaygr.lab.outcome import Moment

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Chart", "against", "bars", "over_time"]

_COLOURS: Final = {
    "full": "#b3432b",
    "cache": "#c9962c",
    "relay+host+extend": "#1f6f8b",
    "relay": "#6aa5b8",
    "relay+host": "#3f8aa3",
    "truncate": "#8a8a8a",
    "always trigger": "#5b7f5b",
    "never trigger": "#a58ab8",
}
_PATHS: Final = {
    "RESIDENT, left by an earlier request": "#1f6f8b",
    "RESIDENT, made for this request": "#6aa5b8",
    "WAITED": "#a7c9a0",
    "RELOADED": "#d8cf8a",
    "EXTENDED": "#c9962c",
    "FULL": "#b3432b",
    "TRUNCATED": "#8a8a8a",
    "not answered": "#dddddd",
}


class Chart:
    """One figure with its title, written to a folder as PNG and given as SVG."""

    def __init__(self, name: str, title: str, figure: "Figure") -> None:
        self.name = name
        self.title = title
        self._figure = figure

    def svg(self) -> str:
        """For a page: no declaration before it, the same each time."""
        out = io.StringIO()
        self._figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None})
        text = out.getvalue()
        return text[text.index("<svg") :]

    def png(self, folder: Path) -> Path:
        path = folder / f"{self.name}.png"
        self._figure.savefig(path, dpi=160, bbox_inches="tight")
        return path


def against(
    name: str, title: str, probes: Sequence[Mapping[str, Any]], what: str, values: Sequence[float], budget_ms: float
) -> Chart:
    """Ranking P99 of every probe against its rate or length, by mode: filled where it held, hollow where not."""
    figure, axes = _axes(title)
    from matplotlib.ticker import LogLocator, NullFormatter

    for mode in _modes(probes):
        mine = [
            (value, row["told"]["ranking P99"] or budget_ms, row["told"]["within budgets"])
            for value, row in sorted(zip(values, probes, strict=True), key=lambda pair: pair[0])
            if row["probe"]["mode"] == mode
        ]
        colour = _COLOURS.get(mode, "#444444")
        xs, ys = [value for value, _, _ in mine], [p99 for _, p99, _ in mine]
        axes.plot(xs, ys, color=colour, linewidth=1.0, alpha=0.5)
        faces = [colour if held else "white" for _, _, held in mine]
        axes.scatter(xs, ys, s=34, c=faces, edgecolors=colour, linewidths=1.3, zorder=3)
        axes.scatter([], [], s=34, color=colour, label=mode)
    axes.axhline(budget_ms, color="#999999", linestyle="--", linewidth=0.9)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(what)
    axes.set_ylabel("ranking P99 of those answered, ms")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    return Chart(name, title, figure)


def bars(name: str, title: str, shares: Mapping[str, Mapping[str, float]]) -> Chart:
    """Mix of paths, one bar for each mode."""
    figure, axes = _axes(title, height=0.6 + 0.42 * len(shares))
    for row, (_, mix) in enumerate(reversed(list(shares.items()))):
        left = 0.0
        for path, colour in _PATHS.items():
            share = mix.get(path, 0.0) if path != "not answered" else max(0.0, 1 - sum(mix.values()))
            axes.barh(row, share, left=left, color=colour, height=0.62, label=path if row == 0 else None)
            left += share
    axes.set_yticks(range(len(shares)), list(reversed(list(shares))))
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of requests")
    axes.legend(frameon=False, fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.45, -0.42))
    return Chart(name, title, figure)


def over_time(name: str, title: str, moments: Sequence[Moment]) -> Chart:
    """Memory, and the device's work, during one probe."""
    figure, axes = _axes(title)
    seconds = [moment.at for moment in moments]
    lines = (
        ("device memory used", [moment.device_used for moment in moments], "#1f6f8b", "-"),
        ("device memory leased", [moment.device_pinned for moment in moments], "#1f6f8b", ":"),
        ("host memory used", [moment.host_used for moment in moments], "#c9962c", "-"),
        ("device busy", [moment.busy for moment in moments], "#444444", "-"),
        ("of that pre-inference", [moment.pre_infer for moment in moments], "#b3432b", "--"),
    )
    for label, shares, colour, style in lines:
        axes.plot(seconds, shares, style, color=colour, linewidth=1.3, label=label)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("seconds")
    axes.set_ylabel("share")
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return Chart(name, title, figure)


def _modes(probes: Sequence[Mapping[str, Any]]) -> list[str]:
    seen = {row["probe"]["mode"] for row in probes}
    return [mode for mode in _COLOURS if mode in seen] + sorted(seen - set(_COLOURS))


def _axes(title: str, height: float = 2.9) -> "tuple[Figure, Axes]":
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidInput("report", "needs matplotlib: pip install 'relaygr[report]'") from error
    mpl.rcParams["svg.hashsalt"] = "relaygr"  # names inside the SVG are the same each time
    title = textwrap.fill(title, 80)
    figure = Figure(figsize=(6.4, height + 0.3 * title.count("\n")), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    return figure, axes
