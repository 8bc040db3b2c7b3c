"""Whether a request is at risk of missing its ranking budget, told before ranking from metadata alone."""

import math
from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NamedTuple

from relaygr.engine.cost import CostModel
from relaygr.engine.outcomes import Decision, Path
from relaygr.errors import InvalidInput
from relaygr.relay.checks import integer, number
from relaygr.relay.margin import Margin
from relaygr.shown import shown

__all__ = ["Forecast", "Shape", "SlotReport", "Trigger", "TriggerConfig", "TriggerMode", "Verdict"]

_COEFFICIENTS: Final = 5
_TEACHES_MS: Final = 2.0
"""What a rank must be predicted to take, for its real time to say something about predictions."""


class TriggerMode(StrEnum):
    """What sends the signal to pre-infer."""

    AT_RISK = "AT_RISK"
    """The risk of missing the ranking budget."""
    ALWAYS = "ALWAYS"
    """Every request that has a prefix: a control."""
    NEVER = "NEVER"
    """Nothing: a control."""


@dataclass(frozen=True)
class TriggerConfig:
    """When a request is at risk."""

    mode: TriggerMode = TriggerMode.AT_RISK
    """What sends the signal: AT_RISK; ALWAYS and NEVER are controls to compare with."""
    ranking_budget_ms: float = 50.0
    """The time ranking may take."""
    target_ms: float | None = None
    """The ranking time aimed at, where the budget is there for the worst case; None: the ranking budget."""
    quantile: float = 0.99
    """The share of ranks that the budget must hold for."""
    min_gain_ms: float = 0.5
    """What a prefix must save at least: below this, pre-inference is not worth its message."""
    wait_ttl_s: float = 1.0
    """How long a reported queue wait is believed. After that the slot is taken to be idle; its costs stay."""
    prior_margin: float = 1.5
    """By what factor predictions are taken to be exceeded at the quantile before anything was served."""
    prior_weight: float = 100.0
    """How many served ranks that prior stands for."""
    memory: int = 2000
    """About how many of the last served ranks the margin is learned from."""

    def __post_init__(self) -> None:
        if self.mode not in list(TriggerMode):
            raise InvalidInput("mode", f"is {shown(self.mode)}; choose from {', '.join(TriggerMode)}")
        for field in ("ranking_budget_ms", "wait_ttl_s", "prior_weight"):
            if number(field, getattr(self, field)) <= 0:
                raise InvalidInput(field, "must be positive")
        if self.target_ms is not None and number("target_ms", self.target_ms) <= 0:
            raise InvalidInput("target_ms", "must be positive")
        if number("min_gain_ms", self.min_gain_ms) < 0:
            raise InvalidInput("min_gain_ms", "must not be negative")
        if not 0 < number("quantile", self.quantile) < 1:
            raise InvalidInput("quantile", f"must be between 0 and 1, not {self.quantile}")
        if not 1 <= number("prior_margin", self.prior_margin) <= 64:
            raise InvalidInput("prior_margin", f"must be at least 1 and at most 64, not {self.prior_margin}")
        integer("memory", self.memory, at_least=1)

    @property
    def aim_ms(self) -> float:
        """What a rank must not take longer than, not to be at risk."""
        return self.ranking_budget_ms if self.target_ms is None else min(self.target_ms, self.ranking_budget_ms)


@dataclass(frozen=True)
class Shape:
    """The sizes of one request, as far as they are known when it arrives."""

    history: int
    """Behaviours it will be ranked on."""
    context: int = 0
    """Context tokens before them."""
    candidates: int = 0
    """Candidates expected to be left for ranking."""

    def __post_init__(self) -> None:
        integer("history", self.history, at_least=0)
        integer("context", self.context, at_least=0)
        integer("candidates", self.candidates, at_least=0)

    @property
    def prefix(self) -> int:
        """Tokens of the prefix."""
        return self.context + self.history


@dataclass(frozen=True)
class SlotReport:
    """What every answer of an instance says about its slot."""

    version: int
    """Of the cost model."""
    coefficients: tuple[float, ...]
    """`CostModel.steps.coefficients`: seconds a step, a new token, a pair of token and key, a candidate, a pair of
    candidate and key."""
    wait_ms: float
    """What a rank would wait for the device."""

    def __post_init__(self) -> None:
        integer("version", self.version, at_least=0)
        if len(self.coefficients) != _COEFFICIENTS:
            raise InvalidInput("coefficients", f"must be {_COEFFICIENTS}, not {len(self.coefficients)}")
        for coefficient in self.coefficients:
            if number("coefficients", coefficient) < 0:
                raise InvalidInput("coefficients", f"must not be negative, not {coefficient}")
        if number("wait_ms", self.wait_ms) < 0:
            raise InvalidInput("wait_ms", "must not be negative")


class Forecast(NamedTuple):
    """What ranking a request is expected to take, in milliseconds, with no margin."""

    wait_ms: float
    """For the device."""
    resident_ms: float
    """On the device, with its prefix there."""
    gain_ms: float
    """On the device, to make the prefix: what having it saves."""

    @property
    def full_ms(self) -> float:
        """On the device, with all of it computed."""
        return self.resident_ms + self.gain_ms

    def on(self, path: Path) -> float | None:
        """Wait and work on a path; None for those whose cost the gateway cannot tell."""
        match path:
            case Path.FULL:
                return self.wait_ms + self.full_ms
            case Path.RESIDENT:
                return self.wait_ms + self.resident_ms
            case _:
                return None


class Verdict(NamedTuple):
    """ADMIT: send the signal. NOT_AT_RISK: ranking alone will do. UNAVAILABLE: no slot to send it to, or
    none that has reported its costs."""

    decision: Decision
    forecast: Forecast | None
    """What it was decided on; None if there were no costs to tell from."""


class _Heard(NamedTuple):
    report: SlotReport
    cost: CostModel
    wait_ms: float
    at: float


class Trigger:
    """The risk test, and what it learns.

    A request is at risk when margin × (wait + T(full)) exceeds the time aimed at and T(full) − T(resident) is worth a
    signal. T and the wait are those of the slot it will go to, as last reported; a slot not heard from is taken for an
    idle one that costs what the one last heard from does. The margin is the configured quantile of actual over
    predicted times of served ranks.
    """

    def __init__(self, config: TriggerConfig | None = None) -> None:
        self.config = config = config or TriggerConfig()
        self.decisions: Counter[Decision] = Counter()
        self._margin = Margin(
            config.quantile, prior=config.prior_margin, prior_weight=config.prior_weight, memory=config.memory
        )
        self._heard: dict[str, _Heard] = {}
        self._newest: CostModel | None = None

    @property
    def margin(self) -> float:
        """The factor by which predictions are exceeded at the quantile."""
        return self._margin.value

    def hear(self, slot: str, report: SlotReport, now: float) -> None:
        """An answer from `slot` came in at `now`."""
        known = self._heard.get(slot)
        if known and known.report.coefficients == report.coefficients:
            cost = known.cost
        else:
            cost = CostModel()
            cost.steps.coefficients = report.coefficients
        self._heard[slot] = _Heard(report, cost, report.wait_ms, now)
        self._newest = cost

    def hear_wait(self, slot: str, wait_ms: float, now: float) -> None:
        """An answer from `slot` told its wait; its costs are those it reported. Before that nothing is kept."""
        known = self._heard.get(slot)
        if known is not None and 0.0 <= wait_ms < math.inf:
            self._heard[slot] = _Heard(known.report, known.cost, wait_ms, now)
            self._newest = known.cost

    def forget(self, slot: str) -> None:
        """The slot has left."""
        self._heard.pop(slot, None)

    def reported(self, slot: str) -> SlotReport | None:
        """What the slot said last."""
        heard = self._heard.get(slot)
        return replace(heard.report, wait_ms=heard.wait_ms) if heard else None

    def forecast(self, slot: str, shape: Shape, now: float) -> Forecast | None:
        """What ranking on `slot` would take; None if no slot has reported. Changes nothing."""
        heard = self._heard.get(slot)
        cost = heard.cost if heard else self._newest
        if cost is None:
            return None
        believed = heard and now - heard.at <= self.config.wait_ttl_s
        return Forecast(
            wait_ms=heard.wait_ms if heard and believed else 0.0,
            resident_ms=1e3 * (cost.step_s + cost.score_s(shape.candidates, shape.prefix)),
            gain_ms=1e3 * cost.append_s(shape.prefix, 0),
        )

    def decide(self, slot: str | None, shape: Shape, now: float) -> Verdict:
        """Whether to signal `slot` to pre-infer a request of this shape; None where no slot is up.

        Counts the decision and changes nothing else.
        """
        forecast = None if slot is None else self.forecast(slot, shape, now)
        decision = self._decision(slot, shape, forecast)
        self.decisions[decision] += 1
        return Verdict(decision, forecast)

    def learn(self, forecast: Forecast, path: Path, actual_ms: float) -> None:
        """A rank took this long on this path, waiting included.

        Paths that cannot be predicted teach nothing, and neither do ranks predicted to take less than two milliseconds:
        their time is mostly what no model of the device sees, and says little about the long ones.
        """
        predicted = forecast.on(path)
        if predicted and predicted >= _TEACHES_MS:
            self._margin.observe(actual_ms / predicted)

    def _decision(self, slot: str | None, shape: Shape, forecast: Forecast | None) -> Decision:
        if self.config.mode == TriggerMode.NEVER or not shape.prefix:
            return Decision.NOT_AT_RISK
        if slot is None:
            return Decision.UNAVAILABLE
        if self.config.mode == TriggerMode.ALWAYS:
            return Decision.ADMIT
        if forecast is None:
            return Decision.UNAVAILABLE
        late = self.margin * (forecast.wait_ms + forecast.full_ms) > self.config.aim_ms
        return Decision.ADMIT if late and forecast.gain_ms >= self.config.min_gain_ms else Decision.NOT_AT_RISK
