"""Signals and ranks over HTTP to real instances: they meet, and a death moves its keys alone."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path as FilePath
from typing import Any

import msgspec
import numpy as np
import pytest

from oracle import assert_scores, oracle_scores
from relaygr import Candidates, Decision, Engine, EngineConfig, History, Path, build_model
from relaygr.clock import RealClock
from relaygr.errors import InvalidInput, Overloaded, Unavailable
from relaygr.history import LmdbStore
from relaygr.relay import Evidence, Health, Membership, Router, RouterConfig, Trigger, TriggerConfig, TriggerMode
from relaygr.serving.client import Response
from relaygr.serving.engine_server import serve_engine
from relaygr.serving.http import Reply, Request
from relaygr.serving.instance import InstanceApp
from relaygr.serving.link import EngineLink
from relaygr.serving.ranking import RelayRanking
from relaygr.serving.run import bind, listening

MODEL = build_model("hstu", layers=1, dim=16, heads=2, items=100, seed=0)
DRAW = np.random.default_rng(0)
HISTORY = History(DRAW.integers(0, 100, 400), DRAW.integers(0, 16, 400), np.arange(400) * 60)
ITEMS = Candidates(np.array([5, 6, 7]))
SLOTS = ("slot-0", "slot-1", "slot-2")


class Relay:
    """Three instances and the ranking in front of them."""

    def __init__(
        self, ranking: RelayRanking, apps: dict[str, InstanceApp], stops: dict[str, Callable[[], Any]]
    ) -> None:
        self.ranking, self.apps, self._stops = ranking, apps, stops

    async def kill(self, slot: str) -> None:
        await self._stops[slot]()

    async def rank(self, user: str, slot: str | None = None, history: History = HISTORY) -> Any:
        deadline = RealClock().now() + 20
        return await self.ranking.rank(user, history, ITEMS, None, None, slot=slot, deadline=deadline)

    async def signal(self, user: str, history: History = HISTORY) -> Any:
        return await self.ranking.signal(user, history, None, due=RealClock().now() + 20)


@contextlib.asynccontextmanager
async def instance(folder: FilePath, slot: str, store: LmdbStore) -> AsyncIterator[tuple[InstanceApp, str]]:
    ready, until = asyncio.Event(), asyncio.Event()
    async with Engine(MODEL, EngineConfig(device_cache="8MiB", host_cache="0")) as engine:
        serving = asyncio.create_task(serve_engine(engine, str(folder / slot), ready.set, until))
        await ready.wait()
        link = await EngineLink.connect(str(folder / slot))
        app = InstanceApp(link, store, slot)
        async with listening(app, bind("127.0.0.1", 0)) as port:
            yield app, f"http://127.0.0.1:{port}"
        await link.close()
        until.set()
        await serving


def run(folder: FilePath, test: Callable[[Relay], Coroutine[Any, Any, None]], stored: int = 0) -> None:
    async def main() -> None:
        membership, apps, stops = Membership(), {}, {}
        async with contextlib.AsyncExitStack() as stack:
            store = stack.enter_context(LmdbStore(folder / "store"))
            if stored:
                part = HISTORY[:stored]
                store.append("user-1", part.items, part.actions, part.timestamps)
            for slot in SLOTS:
                own = await stack.enter_async_context(contextlib.AsyncExitStack())
                apps[slot], address = await own.enter_async_context(instance(folder, slot, store))
                stops[slot] = own.aclose
                membership.add(slot, address)
            router = Router(membership, RouterConfig(quiet_tokens=100_000))
            trigger = Trigger(TriggerConfig(mode=TriggerMode.ALWAYS))
            ranking = await stack.enter_async_context(RelayRanking(membership, router, trigger, RealClock()))
            await test(Relay(ranking, apps, stops))

    asyncio.run(main())


def test_probes_bring_slots_up_and_tell_their_costs(tmp_path: FilePath) -> None:
    async def test(relay: Relay) -> None:
        assert relay.ranking.membership.placeable == SLOTS
        assert all(relay.ranking.trigger.reported(slot) is not None for slot in SLOTS)
        relay.apps["slot-1"].draining = True
        await relay.ranking.probe()
        assert relay.ranking.membership.health("slot-1") is Health.DRAINING

    run(tmp_path, test)


def test_signal_and_rank_meet_on_the_same_slot_and_the_rank_finds_the_prefix(tmp_path: FilePath) -> None:
    async def test(relay: Relay) -> None:
        for user in ("user-1", "user-2", "user-3", "user-4"):
            signal = await relay.signal(user)
            assert signal.decision is Decision.ADMIT
            reply = await relay.rank(user, signal.slot)
            assert reply.slot == signal.slot
            assert reply.path in (Path.WAITED, Path.RESIDENT)
            assert_scores(reply.scores, oracle_scores(MODEL, HISTORY, ITEMS.items))
            assert (await relay.signal(user)).decision is Decision.RESIDENT

    run(tmp_path, test)


@pytest.mark.parametrize("strange", [b"\xc1", b"\x80", None])
def test_an_answer_that_is_not_understood_is_none_and_the_rank_goes_elsewhere(
    tmp_path: FilePath, strange: bytes | None
) -> None:
    async def test(relay: Relay) -> None:
        slot = (await relay.rank("user-1")).slot
        app = relay.apps[slot]
        right = app.reply_to

        async def wrong(request: Request) -> Reply:
            reply = await right(request)
            if request.path == "/v1/status":
                return reply._replace(body=reply.body.replace(b'"actions"', b'"other"'))
            told = msgspec.msgpack.decode(reply.body) | {"path": "ELSEWHERE", "decision": "PERHAPS"}
            return reply._replace(body=strange or msgspec.msgpack.encode(told))

        app.reply_to = wrong  # type: ignore[method-assign]
        with pytest.raises(Unavailable, match="not understood"):
            await relay.signal("user-1")
        reply = await relay.rank("user-1")
        assert reply.slot != slot
        assert_scores(reply.scores, oracle_scores(MODEL, HISTORY, ITEMS.items))
        for _ in range(3):
            await relay.ranking.probe()
        assert relay.ranking.membership.health(slot) is Health.DOWN

    run(tmp_path, test)


def test_slots_that_have_left_or_are_down_say_nothing_about_actions(tmp_path: FilePath) -> None:
    async def test(relay: Relay) -> None:
        ranking = relay.ranking
        ranking.actions["slot-1"] = 3
        with pytest.raises(InvalidInput, match="below 3"):
            ranking.check_actions(np.array([7]))
        ranking.membership.observe("slot-1", Evidence.REFUSED)
        ranking.check_actions(np.array([7]))
        ranking.membership.remove("slot-1")
        await ranking.probe()
        assert sorted(ranking.actions) == ["slot-0", "slot-2"]
        assert len(ranking._clients) == 2

    run(tmp_path, test)


def test_the_store_fills_in_what_a_message_does_not_carry(tmp_path: FilePath) -> None:
    async def test(relay: Relay) -> None:
        reply = await relay.rank("user-1")
        assert_scores(reply.scores, oracle_scores(MODEL, HISTORY, ITEMS.items))
        assert not relay.ranking.retries

    run(tmp_path, test, stored=400)


def test_a_store_with_another_history_costs_one_more_message(tmp_path: FilePath) -> None:
    async def test(relay: Relay) -> None:
        corrected = HISTORY.items.copy()
        corrected[3] += 1
        history = History(corrected, HISTORY.actions, HISTORY.timestamps)
        reply = await relay.rank("user-1", history=history)
        assert_scores(reply.scores, oracle_scores(MODEL, history, ITEMS.items))
        assert relay.ranking.retries == {"conflict": 1}

    run(tmp_path, test, stored=400)


def test_when_a_slot_dies_its_keys_alone_move_and_their_ranks_are_served(tmp_path: FilePath) -> None:
    async def test(relay: Relay) -> None:
        users = [f"user {number}" for number in range(24)]
        before = {user: (await relay.rank(user)).slot for user in users}
        assert set(before.values()) == set(SLOTS)
        signal = await relay.signal("user 0")
        await relay.kill(before["user 0"])
        reply = await relay.rank("user 0", signal.slot)
        assert reply.slot != before["user 0"]
        assert reply.path is Path.FULL
        assert_scores(reply.scores, oracle_scores(MODEL, HISTORY, ITEMS.items))
        for user in users:
            after = (await relay.rank(user)).slot
            assert after == before[user] or before[user] == before["user 0"]

    run(tmp_path, test)


def test_a_draining_slot_refuses_and_the_rank_goes_elsewhere(tmp_path: FilePath) -> None:
    async def test(relay: Relay) -> None:
        slot = (await relay.rank("user-1")).slot
        relay.apps[slot].draining = True
        reply = await relay.rank("user-1", slot)
        assert reply.slot != slot
        assert_scores(reply.scores, oracle_scores(MODEL, HISTORY, ITEMS.items))

    run(tmp_path, test)


def test_with_no_slot_left_it_is_unavailable(tmp_path: FilePath) -> None:
    async def test(relay: Relay) -> None:
        for slot in SLOTS:
            await relay.kill(slot)
        with pytest.raises(Unavailable):
            await relay.rank("user-1")

    run(tmp_path, test)


def test_what_an_instance_refuses_is_the_callers_error_and_no_reason_to_go_elsewhere(tmp_path: FilePath) -> None:
    async def test(relay: Relay) -> None:
        bad = History([1], [99], [1])
        with pytest.raises(InvalidInput, match="actions"):
            await relay.rank("user-1", history=bad)
        assert not relay.ranking.retries
        assert relay.ranking.membership.placeable == SLOTS

    run(tmp_path, test)


def test_the_trigger_learns_from_a_refusal_that_the_rank_would_have_been_late_unless_it_was_signalled(
    tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(relay: Relay) -> None:
        await relay.ranking.probe()
        slot = (await relay.rank("user-1")).slot
        learned: list[tuple[Path, float]] = []
        monkeypatch.setattr(relay.ranking.trigger, "learn", lambda _, path, took_ms: learned.append((path, took_ms)))

        async def refuses(*_: Any) -> Response:
            return Response(429, {"content-type": "application/json"}, b'{"error": "Overloaded", "message": "busy"}')

        monkeypatch.setattr(relay.ranking, "_post", refuses)
        with pytest.raises(Overloaded):
            await relay.rank("user-1", slot)
        assert not learned
        with pytest.raises(Overloaded):
            await relay.rank("user-1")
        ((path, took),) = learned
        assert path is Path.FULL
        assert took == pytest.approx(20_000, abs=2_000), "all the time that it had"

    run(tmp_path, test)
