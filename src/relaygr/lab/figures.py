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

_LOOKS: Final = {
    "full": ("#b3432b", "s"),
    "cache": ("#d39a1e", "^"),
    "relay+host+extend": ("#1f6f8b", "o"),
    "relay": ("#8a5cc4", "D"),
    "relay+host": ("#3d9a57", "v"),
    "truncate": ("#8a8a8a", "X"),
    "always trigger": ("#d1589b", "P"),
    "never trigger": ("#4a4a4a", "*"),
}
"""By mode: its colour, and its marker, for those that lie on each other."""
_OTHER: Final = ("#777733", "h")
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
    """Ranking P99 of every probe against its rate or length, by mode: filled where it held, hollow where not. One that
    answered nothing has no P99. Modes are set a little aside of each other, so that none hides another."""
    figure, axes = _axes(title)
    from matplotlib.transforms import offset_copy

    modes = _modes(probes)
    for place, mode in enumerate(modes):
        mine = [
            (value, row["told"]["ranking P99"], row["told"]["within budgets"])
            for value, row in sorted(zip(values, probes, strict=True), key=lambda pair: pair[0])
            if row["probe"]["mode"] == mode and row["told"]["ranking P99"] is not None
        ]
        colour, marker = _LOOKS.get(mode, _OTHER)
        xs, ys = [value for value, _, _ in mine], [p99 for _, p99, _ in mine]
        aside = offset_copy(axes.transData, figure, 3.5 * (place - (len(modes) - 1) / 2), units="points")
        axes.plot(xs, ys, color=colour, linewidth=1.0, alpha=0.4, transform=aside)
        faces = [colour if held else "none" for _, _, held in mine]
        axes.scatter(xs, ys, s=36, c=faces, marker=marker, edgecolors=colour, linewidths=1.1, zorder=3, transform=aside)
        axes.scatter([], [], s=40, color=colour, marker=marker, label=mode)
    axes.axhline(budget_ms, color="#999999", linestyle="--", linewidth=0.9, label="budget")
    axes.set_xlim(min(values) / 1.2, max(values) * 1.2)
    axes.set_xscale("log")
    _ticks(axes, max(values) / min(values))
    axes.set_xlabel(what)
    axes.set_ylabel("ranking P99 of those answered, ms")
    answered = [row["told"]["ranking P99"] or 0.0 for row in probes]
    axes.set_ylim(0, 1.08 * max(budget_ms, *answered))
    _legend_beside(axes)
    return Chart(name, title, figure)


def bars(name: str, title: str, shares: Mapping[str, Mapping[str, float]]) -> Chart:
    """Mix of paths, one bar for each mode."""
    figure, axes = _axes(title, height=max(2.0, 0.6 + 0.42 * len(shares)))
    for row, (_, mix) in enumerate(reversed(list(shares.items()))):
        left = 0.0
        for path, colour in _PATHS.items():
            share = mix.get(path, 0.0) if path != "not answered" else max(0.0, 1 - sum(mix.values()))
            axes.barh(row, share, left=left, color=colour, height=0.62, label=path if row == 0 else None)
            left += share
    axes.set_yticks(range(len(shares)), list(reversed(list(shares))))
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of requests")
    _legend_beside(axes)
    return Chart(name, title, figure)


def over_time(name: str, title: str, moments: Sequence[Moment]) -> Chart:
    """Memory, and the device's work, during one probe."""
    figure, axes = _axes(title)
    seconds = [moment.at for moment in moments]
    lines = (
        ("device memory used", [moment.device_used for moment in moments], "#1f6f8b", "-"),
        ("device memory leased", [moment.device_pinned for moment in moments], "#1f6f8b", ":"),
        ("device busy", [moment.busy for moment in moments], "#444444", "-"),
        ("of that pre-inference", [moment.pre_infer for moment in moments], "#b3432b", "--"),
    )
    host = [moment.host_used for moment in moments]
    axes.fill_between(seconds, host, color="#c9962c", alpha=0.25, linewidth=0, label="host memory used")
    for label, shares, colour, style in lines:
        axes.plot(seconds, shares, style, color=colour, linewidth=1.3, label=label)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("seconds")
    axes.set_ylabel("share")
    _legend_beside(axes)
    return Chart(name, title, figure)


def _legend_beside(axes: "Axes") -> None:
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _ticks(axes: "Axes", span: float) -> None:
    """On a logarithmic axis: as many as there is room for, whether it spans a step or two decades."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    if span < 4:
        axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
    else:
        few, some, many = (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0), (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
        axes.xaxis.set_major_locator(LogLocator(subs=many if span < 10 else some if span < 30 else few, numticks=20))
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def _modes(probes: Sequence[Mapping[str, Any]]) -> list[str]:
    seen = {row["probe"]["mode"] for row in probes}
    return [mode for mode in _LOOKS if mode in seen] + sorted(seen - set(_LOOKS))


def _axes(title: str, height: float = 3.1) -> "tuple[Figure, Axes]":
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidInput("report", "needs matplotlib: pip install 'relaygr[report]'") from error
    mpl.rcParams["svg.hashsalt"] = "relaygr"  # names inside the SVG are the same each time
    title = textwrap.fill(title, 80)
    figure = Figure(figsize=(7.4, height + 0.3 * title.count("\n")), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    return figure, axes
