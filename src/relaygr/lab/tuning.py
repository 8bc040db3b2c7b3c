"""The settings that budgets call for: of scheduler, admission and trigger."""

from dataclasses import dataclass, replace

from relaygr.config import EngineConfig
from relaygr.lab.outcome import Budgets
from relaygr.relay import TriggerConfig, TriggerMode
from relaygr.serving.modes import Mode

__all__ = ["Tuning"]


@dataclass(frozen=True)
class Tuning:
    """What is set for a run, and recorded with it."""

    step_ms: float
    """The longest a step should take: what an urgent rank may wait behind."""
    target_ms: float
    """The ranking time the trigger aims at."""
    pre_infer_share: float = 1.0
    """The share of device time that pre-inference may take: all of it where every long history goes by relay."""

    @staticmethod
    def of(budgets: Budgets, mode: Mode) -> "Tuning":
        """A signal for whatever would take a fifth of the ranking budget, and steps of a tenth of it.

        Without signals nothing long runs ahead of its rank, and cutting a rank's own appends into steps only delays
        it: they may take as long as the budget.
        """
        signals = mode.trigger(TriggerConfig()).mode is not TriggerMode.NEVER
        return Tuning(budgets.ranking_ms / (10 if signals else 1), budgets.ranking_ms / 5)

    def engine(self, config: EngineConfig) -> EngineConfig:
        return replace(config, step_ms=self.step_ms, pre_infer_share=self.pre_infer_share)

    def trigger(self, budgets: Budgets) -> TriggerConfig:
        return TriggerConfig(ranking_budget_ms=budgets.ranking_ms, target_ms=self.target_ms)
