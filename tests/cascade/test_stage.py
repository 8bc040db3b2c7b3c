"""The seams: work leaves the event loop or does not, and the fixed ranking does what it says."""

import asyncio
import math
import threading

import numpy as np
import pytest

from behaviours import numbered
from engines import in_virtual_time
from relaygr import Candidates, Decision
from relaygr.cascade import FixedRanking, in_thread, inline
from relaygr.clock import RealClock
from relaygr.errors import Overloaded


def test_work_in_a_thread_leaves_the_event_loop() -> None:
    assert asyncio.run(in_thread(threading.get_ident)) != threading.get_ident()


@in_virtual_time
async def test_work_inline_is_done_at_once() -> None:
    assert await inline(threading.get_ident) == threading.get_ident()


@in_virtual_time
async def test_a_fixed_ranking_replies_after_its_times_with_the_ids_as_scores() -> None:
    loop = asyncio.get_running_loop()
    ranking = FixedRanking(RealClock(), Decision.RESIDENT, signal_s=1.0, rank_s=2.0)
    signal = await ranking.signal("u1", numbered(3), None, due=9.0)
    assert (signal.decision, signal.slot, loop.time()) == (Decision.RESIDENT, "fixed", 1.0)
    reply = await ranking.rank("u1", numbered(3), Candidates([7, 5]), None, None, slot="b", deadline=9.0)
    assert (reply.scores.tolist(), reply.slot, reply.used, loop.time()) == ([[7], [5]], "b", 3, 3.0)
    assert reply.scores.dtype == np.float32
    assert (len(ranking.signals), len(ranking.ranks), ranking.under_way) == (1, 1, 0)


@in_virtual_time
async def test_a_fixed_ranking_fails_or_never_replies_where_it_is_told_to() -> None:
    ranking = FixedRanking(RealClock(), signal_s=math.inf, rank_error=Overloaded("full"))
    with pytest.raises(Overloaded):
        await ranking.rank("u1", numbered(3), Candidates([7]), None, None, slot=None, deadline=9.0)
    never = asyncio.create_task(ranking.signal("u1", numbered(3), None, due=9.0))
    await asyncio.sleep(1e6)
    assert (never.done(), ranking.under_way) == (False, 1)
    never.cancel()
    await asyncio.wait((never,))
    assert ranking.under_way == 0
