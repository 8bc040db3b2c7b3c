"""Ranking by an engine in this process."""

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from relaygr.cascade.stage import RankReply, Signal
from relaygr.history import History
from relaygr.model import Candidates

if TYPE_CHECKING:
    from relaygr.engine import Engine

__all__ = ["EngineRanking"]


class EngineRanking:
    """An engine in this process, as the one slot there is. The pipeline's clock must be the engine's."""

    SLOT: Final = "local"

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine

    async def signal(self, user: str, history: History, context: Any, *, due: float) -> Signal:
        return Signal(self._engine.signal(user, history, context=context, deadline=due), self.SLOT)

    async def rank(
        self,
        user: str,
        history: History,
        candidates: Candidates,
        context: Any,
        request: npt.NDArray[np.float32] | None,
        *,
        slot: str | None,
        deadline: float,
    ) -> RankReply:
        ranked = await self._engine.rank(user, history, candidates, context=context, request=request, deadline=deadline)
        return RankReply(ranked.scores, ranked.path, ranked.used, ranked.epoch, self.SLOT, ranked.timings)
