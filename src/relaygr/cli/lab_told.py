"""What a run tells, as rows of a table."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

__all__ = ["number", "rows", "share"]

_SHARES: Final = frozenset(
    (
        "failed", "failed, 95%", "reuse", "device busy", "pre-inference", "trigger precision", "trigger recall",
        "decisions", "paths",
    )
)  # fmt: skip
_MILLISECONDS: Final = frozenset(("ranking P50", "ranking P99", "ranking P99, 95%", "pipeline P99", "sender late P99"))
_NAMES: Final = {
    "budgets_ms": "budgets, ms",
    "reloaded": "reloaded, for each request",
    "oracle": "scores, against full inference",
}


def rows(told: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """Of runs side by side: each row's name, and a cell for each run. What none of them has is left out."""
    for name in told[0]:
        values = [each[name] for each in told]
        if name != "mode" and any(value is not None and value != {} for value in values):
            yield _named(name), [_cell(name, value) for value in values]


def number(value: float | None) -> str:
    """A dash where there is none."""
    return "–" if value is None else f"{value:.3g}"


def share(value: float | None) -> str:
    """In percent; a dash where there is none."""
    return "–" if value is None else f"{100 * value:.3g}%"


def _named(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    quantity, comma, interval = name.partition(",")
    return f"{quantity}, ms{comma}{interval}" if name in _MILLISECONDS else name


def _cell(name: str, value: Any) -> str:
    shown = share if name in _SHARES else number
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return "\n".join(f"{key} {_cell(name, part)}" for key, part in value.items())
    if name == "budgets_ms":
        return " / ".join(f"{budget:g}" for budget in value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        if name.endswith(", 95%"):
            low, high = value
            return f"{shown(low)} or more" if high is None else f"{shown(low)} – {shown(high)}"
        return ", ".join(_cell(name, part) for part in value)
    return shown(value) if isinstance(value, float) or value is None else str(value)
