"""A signal is sent when ranking alone would be late and a prefix saves enough; the margin is learned."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr import Decision, Path
from relaygr.engine.cost import CostModel
from relaygr.errors import InvalidInput
from relaygr.relay import Forecast, Shape, SlotReport, Trigger, TriggerConfig, TriggerMode

COSTS = (1e-3, 2e-6, 1e-9, 5e-6, 2e-9)
REPORT = SlotReport(version=3, coefficients=COSTS, wait_ms=0.0)
PLAIN = TriggerConfig(ranking_budget_ms=20.0, min_gain_ms=2.0, prior_margin=1.0)
"""A margin of 1, to within a bin."""

costs = st.tuples(*[st.floats(0, 1e-3), st.floats(0, 1e-5), st.floats(0, 1e-8), st.floats(0, 1e-4), st.floats(0, 1e-8)])
shapes = st.builds(Shape, st.integers(0, 30_000), st.integers(0, 20), st.integers(0, 2000))
RISE = {Decision.NOT_AT_RISK: 0, Decision.ADMIT: 1}


def trigger(config: TriggerConfig = PLAIN, report: SlotReport | None = REPORT) -> Trigger:
    made = Trigger(config)
    if report:
        made.hear("a", report, now=0.0)
    return made


def decision(trigger: Trigger, shape: Shape, slot: str | None = "a", now: float = 0.0) -> Decision:
    return trigger.decide(slot, shape, now).decision


@given(shapes, costs, st.floats(0, 500))
def test_a_forecast_is_what_the_cost_model_says(
    shape: Shape, costs: tuple[float, float, float, float, float], wait: float
) -> None:
    model = CostModel()
    model.steps.coefficients = costs
    forecast = trigger(report=SlotReport(1, costs, wait)).forecast("a", shape, 0.0)
    assert forecast is not None
    tokens = shape.history + shape.context
    score = model.step_s + model.score_s(shape.candidates, tokens)
    assert forecast.wait_ms == wait
    assert forecast.resident_ms == pytest.approx(1e3 * score)
    assert forecast.full_ms == pytest.approx(1e3 * (score + model.append_s(tokens, 0)))
    assert forecast.gain_ms == pytest.approx(1e3 * model.append_s(tokens, 0))
    assert forecast.on(Path.FULL) == forecast.wait_ms + forecast.full_ms
    assert forecast.on(Path.RESIDENT) == forecast.wait_ms + forecast.resident_ms
    assert all(forecast.on(path) is None for path in set(Path) - {Path.FULL, Path.RESIDENT})


@given(shapes, st.integers(0, 30_000), costs, st.floats(0, 100), st.floats(0, 20))
def test_a_longer_history_is_never_less_at_risk(
    shape: Shape, more: int, costs: tuple[float, ...], wait: float, gain: float
) -> None:
    judge = trigger(replace(PLAIN, min_gain_ms=gain), SlotReport(1, costs, wait))
    longer = replace(shape, history=shape.history + more)
    assert RISE[decision(judge, shape)] <= RISE[decision(judge, longer)]


@given(shapes, costs, st.floats(0, 100), st.floats(0, 100), st.floats(0, 20))
def test_a_longer_wait_is_never_less_at_risk(
    shape: Shape, costs: tuple[float, ...], wait: float, more: float, gain: float
) -> None:
    config = replace(PLAIN, min_gain_ms=gain)
    short, long = (trigger(config, SlotReport(1, costs, each)) for each in (wait, wait + more))
    assert RISE[decision(short, shape)] <= RISE[decision(long, shape)]


@given(shapes, costs, st.floats(0, 100), st.lists(st.floats(0.1, 10), max_size=30))
def test_at_risk_means_late_at_the_margin_and_worth_it(
    shape: Shape, costs: tuple[float, ...], wait: float, ratios: list[float]
) -> None:
    judge = trigger(replace(PLAIN, prior_weight=1), SlotReport(1, costs, wait))
    for ratio in ratios:
        judge.learn(Forecast(0.0, 1.0, 9.0), Path.FULL, 10.0 * ratio)
    verdict = judge.decide("a", shape, 0.0)
    forecast = verdict.forecast
    assert forecast is not None
    late = judge.margin * (forecast.wait_ms + forecast.full_ms) > 20.0
    at_risk = late and forecast.gain_ms >= 2.0 and shape.prefix > 0
    assert verdict.decision is (Decision.ADMIT if at_risk else Decision.NOT_AT_RISK)


@given(st.integers(0, 500), st.floats(0, 1e6))
def test_short_histories_are_never_pre_inferred_however_long_the_wait(history: int, wait: float) -> None:
    judge = trigger(report=replace(REPORT, wait_ms=wait))  # 500 tokens: 1.1 ms saved
    assert decision(judge, Shape(history, candidates=500)) is Decision.NOT_AT_RISK


def test_a_history_that_fits_becomes_at_risk_behind_a_queue() -> None:
    shape = Shape(2000, candidates=500)  # 6 ms to append, 5.5 ms to score
    assert decision(trigger(), shape) is Decision.NOT_AT_RISK
    assert decision(trigger(report=replace(REPORT, wait_ms=10.0)), shape) is Decision.ADMIT


def test_a_wait_is_believed_for_a_while_and_costs_for_good() -> None:
    judge, shape = trigger(report=replace(REPORT, wait_ms=10.0)), Shape(2000, candidates=500)
    assert decision(judge, shape, now=1.0) is Decision.ADMIT
    assert decision(judge, shape, now=1.01) is Decision.NOT_AT_RISK
    assert decision(judge, Shape(8000), now=1e6) is Decision.ADMIT


def test_the_newest_report_of_a_slot_counts() -> None:
    judge, shape = trigger(), Shape(2000, candidates=500)
    judge.hear("a", replace(REPORT, wait_ms=50.0), now=0.5)
    assert decision(judge, shape, now=0.5) is Decision.ADMIT
    judge.hear("a", SlotReport(4, tuple(each / 10 for each in COSTS), 0.0), now=0.6)
    assert decision(judge, Shape(8000), now=0.6) is Decision.NOT_AT_RISK
    assert judge.reported("a") == SlotReport(4, tuple(each / 10 for each in COSTS), 0.0)


def test_each_slot_is_judged_by_its_own_report() -> None:
    judge, shape = trigger(), Shape(2000, candidates=500)
    judge.hear("b", replace(REPORT, wait_ms=50.0), now=0.0)
    assert [decision(judge, shape, slot) for slot in ("a", "b")] == [Decision.NOT_AT_RISK, Decision.ADMIT]


def test_a_slot_not_heard_from_is_taken_for_an_idle_one_like_the_others() -> None:
    judge = trigger(report=replace(REPORT, wait_ms=50.0))
    assert decision(judge, Shape(2000, candidates=500), "new") is Decision.NOT_AT_RISK
    assert decision(judge, Shape(8000), "new") is Decision.ADMIT
    judge.forget("a")
    judge.forget("a")
    assert judge.reported("a") is None
    assert decision(judge, Shape(8000), "a") is Decision.ADMIT


def test_before_any_report_and_without_a_slot_it_is_unavailable() -> None:
    verdict = trigger(report=None).decide("a", Shape(8000), 0.0)
    assert (verdict.decision, verdict.forecast) == (Decision.UNAVAILABLE, None)
    assert decision(trigger(), Shape(8000), slot=None) is Decision.UNAVAILABLE


def test_each_decision_is_counted() -> None:
    judge = trigger()
    for shape, slot in ((Shape(8000), "a"), (Shape(8000), "a"), (Shape(10), "a"), (Shape(10), None)):
        judge.decide(slot, shape, 0.0)
    assert judge.decisions == {Decision.ADMIT: 2, Decision.NOT_AT_RISK: 1, Decision.UNAVAILABLE: 1}


@given(st.integers(1, 30_000), st.booleans())
def test_the_controls_always_and_never_signal(history: int, reported: bool) -> None:
    report = REPORT if reported else None
    always, never = (trigger(replace(PLAIN, mode=mode), report) for mode in (TriggerMode.ALWAYS, TriggerMode.NEVER))
    assert decision(always, Shape(history)) is Decision.ADMIT
    assert decision(never, Shape(history)) is Decision.NOT_AT_RISK
    assert (always.decide("a", Shape(history), 0.0).forecast is not None) == reported


def test_nothing_to_pre_infer_is_never_signalled() -> None:
    judge = trigger(replace(PLAIN, mode=TriggerMode.ALWAYS))
    assert decision(judge, Shape(0, candidates=500)) is Decision.NOT_AT_RISK
    assert decision(judge, Shape(0, context=1)) is Decision.ADMIT
    assert decision(judge, Shape(8000), slot=None) is Decision.UNAVAILABLE


def test_the_margin_starts_at_the_prior_and_learns_what_is_served() -> None:
    judge = trigger(TriggerConfig(ranking_budget_ms=20.0, quantile=0.9, prior_margin=2.0))
    shape = Shape(2000, candidates=500)  # 11.5 ms predicted
    assert judge.margin == pytest.approx(2.0, rel=0.03)
    verdict = judge.decide("a", shape, 0.0)
    assert verdict.decision is Decision.ADMIT
    assert verdict.forecast is not None
    for _ in range(1000):
        judge.learn(verdict.forecast, Path.FULL, 11.5 * 1.2)
    assert judge.margin == pytest.approx(1.2, rel=0.03)
    assert decision(judge, shape) is Decision.NOT_AT_RISK


def test_the_share_of_ranks_beyond_the_margin_is_what_was_asked_for() -> None:
    judge, draw = trigger(TriggerConfig(quantile=0.95)), np.random.default_rng(5)
    beyond = 0
    for number in range(8000):
        shape = Shape(int(draw.integers(1000, 8000)), candidates=500)
        forecast = judge.forecast("a", shape, 0.0)
        assert forecast is not None
        path = (Path.FULL, Path.RESIDENT)[number % 2]
        predicted = forecast.on(path)
        assert predicted is not None
        actual = predicted * float(np.exp(0.3 * draw.standard_normal()))
        beyond += number >= 2000 and actual > judge.margin * predicted
        judge.learn(forecast, path, actual)
    assert 0.03 < beyond / 6000 < 0.06


@pytest.mark.parametrize(
    ("forecast", "path"),
    [
        (Forecast(0.0, 5.0, 5.0), Path.WAITED),
        (Forecast(0.0, 5.0, 5.0), Path.EXTENDED),
        (Forecast(0.0, 5.0, 5.0), Path.RELOADED),
        (Forecast(0.0, 5.0, 5.0), Path.TRUNCATED),
        (Forecast(0.0, 1.9, 8.1), Path.RESIDENT),
        (Forecast(0.0, 0.0, 0.0), Path.FULL),
    ],
)
def test_ranks_that_say_nothing_about_predictions_teach_nothing(forecast: Forecast, path: Path) -> None:
    judge = trigger(replace(PLAIN, prior_weight=1, min_gain_ms=0.5))
    before = judge.margin
    for _ in range(100):
        judge.learn(forecast, path, 40.0)
    assert judge.margin == before


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        *((field, bad) for field in ("ranking_budget_ms", "wait_ttl_s", "prior_weight") for bad in (0, -1, math.inf)),
        *(("min_gain_ms", bad) for bad in (-0.1, math.nan, "2", None)),
        *(("quantile", bad) for bad in (0, 1, 1.5, True)),
        *(("prior_margin", bad) for bad in (0.5, 100, math.nan)),
        *(("memory", bad) for bad in (0, 1.5, "many")),
        *(("mode", bad) for bad in ("always", "", None)),
    ],
)
def test_a_bad_config_is_refused_by_the_name_of_its_field(field: str, bad: object) -> None:
    with pytest.raises(InvalidInput, match=f"^{field}: "):
        TriggerConfig(**{field: bad})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("version", -1),
        ("version", "1"),
        ("coefficients", (1.0,) * 4),
        ("coefficients", (0.0, 0.0, -1e-9, 0.0, 0.0)),
        ("coefficients", (0.0, 0.0, math.nan, 0.0, 0.0)),
        ("wait_ms", -1.0),
        ("wait_ms", math.inf),
    ],
)
def test_a_bad_report_is_refused_by_the_name_of_its_field(field: str, bad: object) -> None:
    with pytest.raises(InvalidInput, match=f"^{field}: "):
        replace(REPORT, **{field: bad})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["history", "context", "candidates"])
def test_a_negative_size_is_refused(field: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{field}: "):
        Shape(**{"history": 1, field: -1})
