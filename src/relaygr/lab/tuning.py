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
    lease_s: float = 2.0
    """How long a prefix is kept for a rank that does not come."""

    @staticmethod
    def of(budgets: Budgets, mode: Mode, step_s: float = 0.0, alone_s: float = 0.0) -> "Tuning":
        """A signal for whatever would take a tenth of the ranking budget, and steps of a fifth of it.

        Two steps may be in flight, and then there is time for the rank's own; shorter steps cost more for each token.
        They are longer, up to a quarter of the budget, where any step costs much by itself: `step_s`.
        Without signals nothing long runs ahead of its rank, and cutting a rank's own appends into steps only delays
        it, as does running it together with another: a step is what one rank takes alone, `alone_s`, or as long as the
        budget where that is not known.
        """
        ranking_ms = budgets.ranking_ms
        step_ms = min(max(ranking_ms / 5, 10 * step_s * 1e3), ranking_ms / 4)
        if mode.trigger(TriggerConfig()).mode is TriggerMode.NEVER:
            step_ms = min(1.1e3 * alone_s or ranking_ms, ranking_ms)
        return Tuning(step_ms, ranking_ms / 10, lease_s=2 * budgets.pipeline_ms / 1e3)

    def one_at_a_time(self, budgets: Budgets) -> "Tuning":
        """The same where only one request is under way at a time: nobody waits behind a long step."""
        return replace(self, step_ms=max(self.step_ms, budgets.ranking_ms / 2))

    def engine(self, config: EngineConfig) -> EngineConfig:
        return replace(config, step_ms=self.step_ms, pre_infer_share=self.pre_infer_share, lease_s=self.lease_s)

    def trigger(self, budgets: Budgets) -> TriggerConfig:
        return TriggerConfig(ranking_budget_ms=budgets.ranking_ms, target_ms=self.target_ms)
