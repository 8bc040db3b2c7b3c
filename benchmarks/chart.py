"""Charts of lines and of bars as SVG, in the colours of the documents' pictures, for light and dark pages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

__all__ = ["Bar", "Bars", "Line", "Panel", "bars", "chart"]

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 440, 330, 64, 56, 56
STYLE = """
    .paper { fill: #ffffff; stroke: #d0d7de } .word { fill: #1f2328 } .dim { fill: #59636e } .rule { stroke: #d1d9e0 }
    .a { stroke: #2f6fc4; fill: #2f6fc4 } .b { stroke: #8250df; fill: #8250df }
    .c { stroke: #cf4a3c; fill: #cf4a3c } .d { stroke: #2c974b; fill: #2c974b }
    polyline { fill: none !important; stroke-width: 2.5 }
    @media (prefers-color-scheme: dark) {
      .paper { fill: #0d1117; stroke: #3d444d } .word { fill: #f0f6fc } .dim { fill: #9aa4af } .rule { stroke: #2a313a }
      .a { stroke: #6ca8f5; fill: #6ca8f5 } .b { stroke: #b692f6; fill: #b692f6 }
      .c { stroke: #f47f71; fill: #f47f71 } .d { stroke: #56d364; fill: #56d364 }
    }"""


@dataclass(frozen=True)
class Line:
    name: str
    colour: str
    """a, b, c or d."""
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    title: str
    lines: Sequence[Line]
    digits: int = 0
    from_zero: bool = False


@dataclass(frozen=True)
class Bar:
    name: str
    colour: str
    """a, b, c or d."""
    size: float | None
    """None: there is none, and the text says why."""
    text: str


@dataclass(frozen=True)
class Bars:
    """Bars that are compared with each other."""

    title: str
    under: str
    bars: Sequence[Bar]


def chart(title: str, about: str, across: str, panels: Sequence[Panel]) -> str:
    """Panels side by side over one kind of x, which is drawn on a scale of doublings."""
    parts = _paper(title, about, WIDTH * len(panels), HEIGHT)
    for index, panel in enumerate(panels):
        parts += [f'  <g transform="translate({index * WIDTH} 0)">', *_panel(panel, across), "  </g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def bars(title: str, about: str, groups: Sequence[Bars]) -> str:
    """Groups of bars below each other, all on one scale."""
    wide, begin, line, room = 2 * WIDTH, 350, 18, 190
    longest = max(bar.size for group in groups for bar in group.bars if bar.size is not None)
    heights = [len(group.bars) * line + 22 for group in groups]
    parts = _paper(title, about, wide, TOP + 8 + sum(heights))
    parts.append(f'  <text class="word" x="20" y="28" font-weight="600">{escape(title)}</text>')
    parts.append(f'  <text class="dim" x="20" y="46">{escape(about)}</text>')
    top = TOP + 8
    for group, height in zip(groups, heights, strict=True):
        parts.append(f'  <text class="word" x="20" y="{top + 13}">{escape(group.title)}</text>')
        parts.append(f'  <text class="dim" x="20" y="{top + 31}">{escape(group.under)}</text>')
        for number, bar in enumerate(group.bars):
            y, reach = top + number * line, (bar.size or 0.0) / longest * (wide - begin - room)
            parts.append(
                f'  <text class="dim" x="{begin - 8}" y="{y + 13}" text-anchor="end">{escape(bar.name)}</text>'
            )
            parts.append(f'  <rect class="{bar.colour}" x="{begin}" y="{y + 3}" width="{reach:.1f}" height="11"/>')
            parts.append(f'  <text class="word" x="{begin + reach + 8:.1f}" y="{y + 13}">{escape(bar.text)}</text>')
        top += height
    return "\n".join([*parts, "</svg>"]) + "\n"


def _paper(title: str, about: str, wide: int, high: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img" aria-labelledby="title desc"',
        "     font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\" font-size=\"13\">",
        f'  <title id="title">{escape(title)}</title>',
        f'  <desc id="desc">{escape(about)}</desc>',
        f"  <style>{STYLE}\n  </style>",
        f'  <rect class="paper" x="0.5" y="0.5" width="{wide - 1}" height="{high - 1}" rx="8"/>',
    ]


def _panel(panel: Panel, across: str) -> list[str]:
    xs = sorted({x for line in panel.lines for x, _ in line.points})
    ys = [y for line in panel.lines for _, y in line.points]
    ticks = _ticks(0.0 if panel.from_zero else min(ys), max(ys))
    right, floor = WIDTH - 24, HEIGHT - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        along = (math.log2(x) - math.log2(xs[0])) / (math.log2(xs[-1]) - math.log2(xs[0]))
        up = (y - ticks[0]) / (ticks[-1] - ticks[0])
        return LEFT + along * (right - LEFT), floor - up * (floor - TOP)

    parts = [f'    <text class="word" x="{LEFT}" y="26" font-weight="600">{escape(panel.title)}</text>']
    for tick in ticks:
        y = at(xs[0], tick)[1]
        parts.append(f'    <line class="rule" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        shown = f"{tick:.{panel.digits}f}"
        parts.append(f'    <text class="dim" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{shown}</text>')
    for x in xs:
        place = at(x, ticks[0])[0]
        parts.append(f'    <text class="dim" x="{place:.1f}" y="{floor + 20}" text-anchor="middle">{x:g}</text>')
    parts.append(
        f'    <text class="dim" x="{(LEFT + right) / 2:.0f}" y="{floor + 42}" text-anchor="middle">{across}</text>'
    )
    for number, line in enumerate(panel.lines):
        points = [at(x, y) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'    <polyline class="{line.colour}" points="{path}"/>')
        parts += [f'    <circle class="{line.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points]
        x = LEFT + 190 * number
        parts.append(f'    <rect class="{line.colour}" x="{x}" y="36" width="14" height="3"/>')
        parts.append(f'    <text class="dim" x="{x + 20}" y="42">{escape(line.name)}</text>')
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers that reach from below the lowest to above the highest, about five of them."""
    rough = (high - low or abs(high) or 1.0) / 4
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough)
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    return [step * number for number in range(first, last + 1)]
