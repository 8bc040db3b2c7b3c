"""What a search came to, and how that is told: the same in a terminal and on a page."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from relaygr.serving.modes import Mode

__all__ = ["UNCONFIRMED", "Found", "Limit", "shown_lengths", "shown_value"]

UNCONFIRMED: Final = "*"
"""The mark of what held once, and was not tried again."""


@dataclass(frozen=True)
class Limit:
    """Of one mode."""

    value: float | None
    """The highest that held; None where none did, or none held when it was tried again."""
    confirmed: bool = False
    """Whether it was tried again, with other arrivals, and held again."""
    failed: float | None = None
    """The lowest that failed above it. None: none did."""

    @property
    def shown(self) -> str:
        return "none" if self.value is None else shown_value(self.value) + ("" if self.confirmed else UNCONFIRMED)

    @property
    def shown_failed(self) -> str:
        return "–" if self.failed is None else shown_value(self.failed)


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    modes: dict[Mode, Limit]
    best: dict[Mode, dict[str, Any]] = field(default_factory=dict)
    """By mode: what the last probe told that held there."""

    @staticmethod
    def of(told: Mapping[str, Mapping[str, Any]]) -> "Found":
        """From plain values, as `told` gives them."""
        return Found({Mode(mode): Limit(**limit) for mode, limit in told.items()})

    def told(self) -> dict[str, dict[str, Any]]:
        """In plain values, without what probes told."""
        return {mode.value: asdict(limit) for mode, limit in self.modes.items()}

    @property
    def limits(self) -> dict[Mode, float | None]:
        """By mode: the highest value that held, confirmed where tries were left for that; None where none did."""
        return {mode: limit.value for mode, limit in self.modes.items()}

    def ratio(self, over: Mode) -> float | None:
        """How many times what `over` holds the whole relay does; None where either holds nothing."""
        relay, other = self.limits.get(Mode.RELAY_HOST_EXTEND), self.limits.get(over)
        return relay / other if relay and other else None

    def ratio_between(self, over: Mode) -> tuple[float | None, float | None]:
        """Where that lies, each limit being somewhere between what held and what failed next. None: not known."""
        relay, other = self.modes.get(Mode.RELAY_HOST_EXTEND), self.modes.get(over)
        if relay is None or other is None or not relay.value or not other.value:
            return None, None
        low = relay.value / other.failed if other.failed else None
        return low, relay.failed / other.value if relay.failed else None

    def shown_ratio(self, over: Mode) -> str:
        """With what it lies between, and marked where a limit was not confirmed; empty where there is none."""
        ratio, (low, high) = self.ratio(over), self.ratio_between(over)
        if ratio is None:
            return ""
        sure = all(self.modes[each].confirmed for each in (over, Mode.RELAY_HOST_EXTEND))
        mark = "" if sure else UNCONFIRMED
        if low is not None and high is not None:
            return f"{ratio:.2f}×{mark} ({low:.2f} – {high:.2f})"
        bound = f" ({low:.2f} or more)" if low is not None else f" ({high:.2f} or less)" if high is not None else ""
        return f"{ratio:.2f}×{mark}{bound}"


def shown_value(value: float) -> str:
    """A rate, or a length."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def shown_lengths(lengths: str) -> str:
    """A workload's, with what they are of."""
    return f"{int(lengths):,} behaviours" if lengths.isdigit() else f"lengths {lengths}"
