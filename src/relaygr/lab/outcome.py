"""What came of a run, and whether it kept to its budgets."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from relaygr.engine import Decision
from relaygr.errors import InvalidInput
from relaygr.lab.estimates import percentile, percentile_interval, share_interval
from relaygr.lab.records import Record
from relaygr.serving.modes import Mode

__all__ = ["LEFT", "SUCCESS", "Budgets", "Moment", "Run"]

SUCCESS: Final = 0.99
"""The share of requests that must be answered within their budgets."""
LEFT: Final = "RESIDENT, left by an earlier request"
_COMPUTED: Final = "RESIDENT, made for this request"


@dataclass(frozen=True)
class Budgets:
    """What an answer must keep to."""

    ranking_ms: float = 50.0
    pipeline_ms: float = 200.0

    def __post_init__(self) -> None:
        if not 0 < self.ranking_ms <= self.pipeline_ms:
            raise InvalidInput("ranking_ms", f"must be positive and at most pipeline_ms, {self.pipeline_ms:g}")

    @property
    def lead_ms(self) -> float:
        """How long after its arrival a request's rank is expected, at the latest, as a gateway says it."""
        return self.pipeline_ms - self.ranking_ms


class Moment(NamedTuple):
    """The engine's state during a run."""

    at: float
    device_used: float
    """The share of the device tier's pages that hold something."""
    device_pinned: float
    host_used: float
    busy: float
    """The share of the time since the moment before that the device was busy."""
    pre_infer: float
    """The same, with pre-inference."""


@dataclass
class Run:
    """What became of a trace's requests, the past left out."""

    mode: Mode
    records: list[Record] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    reused: float = 0.0
    """The share of requests for which nothing was begun from nothing: an earlier one had left a prefix, or they were
    refused before anything was."""
    resident_left: int = 0
    """Of the RESIDENT: those whose prefix an earlier request had left."""
    device_busy: float = 0.0
    """The share of the time, over all devices."""
    pre_infer_share: float = 0.0
    """The same, with pre-inference."""
    reloaded: float | None = None
    """How many prefixes were brought back from host memory for each request. None: not known."""
    planned: int | None = None
    """Requests that were to be sent, where it was cut short. None: all were."""
    behind_ms: float | None = None
    """How late the sender itself was, at P99: what it could not do in time is not the engine's. None: not known."""

    @property
    def requests(self) -> int:
        return len(self.records)

    @property
    def cut_short(self) -> bool:
        """Whether it was ended because too many had failed for it to hold."""
        return self.planned is not None

    @property
    def ranking_ms(self) -> list[float]:
        """Of those that did not fail: from when ranking was to begin."""
        return [record.ranking_ms for record in self.records if not record.failure]

    @property
    def pipeline_ms(self) -> list[float]:
        """Of those that did not fail: from when the request was to be sent."""
        return [record.pipeline_ms for record in self.records if not record.failure]

    @property
    def paths(self) -> Counter[str]:
        return Counter(record.path for record in self.records if record.path)

    @property
    def decisions(self) -> Counter[str]:
        return Counter(record.decision for record in self.records)

    @property
    def failed(self) -> Counter[str]:
        """By the error's name; TRUNCATED counts as a failure, except in the mode that truncates."""
        return Counter(record.failure for record in self.records if record.failure)

    def holds(self, budgets: Budgets, success: float = SUCCESS) -> bool:
        """Whether P99 of ranking and pipeline are within the budgets, and enough requests were answered."""
        ranking, pipeline = self.ranking_ms, self.pipeline_ms
        if self.cut_short or not ranking or len(ranking) < success * self.requests:
            return False
        return percentile(ranking, 99) <= budgets.ranking_ms and percentile(pipeline, 99) <= budgets.pipeline_ms

    def told(self, budgets: Budgets) -> dict[str, Any]:
        """In plain values."""
        ranking, pipeline, requests = self.ranking_ms, self.pipeline_ms, self.requests
        failed = requests - len(ranking)
        interval = share_interval(failed, requests)
        if self.planned is not None:  # it ended with a failure: those that were not sent might all have been answered
            interval = share_interval(failed, self.planned)[0], interval[1]
        precision, recall = self.trigger()
        return {
            "mode": self.mode.value,
            "requests": requests,
            "within budgets": self.holds(budgets),
            "cut short": self.cut_short,
            "failed": failed / requests if requests else 0.0,
            "failed, 95%": list(interval),
            "failures": dict(self.failed),
            "ranking P50": _p(ranking, 50),
            "ranking P99": _p(ranking, 99),
            "ranking P99, 95%": list(percentile_interval(ranking, 99)) if ranking else None,
            "pipeline P99": _p(pipeline, 99),
            "reuse": self.reused,
            "reloaded": self.reloaded,
            "device busy": self.device_busy,
            "pre-inference": self.pre_infer_share,
            "sender late P99": self.behind_ms,
            "trigger precision": precision,
            "trigger recall": recall,
            "decisions": {name: count / requests for name, count in self.decisions.items()},
            "paths": self.shares(),
        }

    def shares(self) -> dict[str, float]:
        """Of the paths among all requests, RESIDENT in its two kinds."""
        counts = Counter({str(path): count for path, count in self.paths.items()})
        resident = counts.pop("RESIDENT", 0)
        left = min(self.resident_left, resident)
        counts += Counter({_COMPUTED: resident - left, LEFT: left})
        return {name: count / self.requests for name, count in counts.most_common()}

    def trigger(self) -> tuple[float | None, float | None]:
        """Precision and recall of signals: against the ranks that computing in full would have made late."""
        sent = [record for record in self.records if record.decision in _SIGNALLED]
        late = [record for record in self.records if record.late_in_full]
        both = sum(record.late_in_full for record in sent)
        return both / len(sent) if sent else None, both / len(late) if late else None


_SIGNALLED: Final = frozenset(map(str, Decision)) - {"NOT_AT_RISK", "UNAVAILABLE"}
"""What is decided by an instance: the signal was sent."""


def _p(values: list[float], percent: float) -> float | None:
    """A percentile of these; None where there are none."""
    return percentile(values, percent) if values else None
