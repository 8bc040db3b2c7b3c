"""Traffic is the same for the same seed, users come back, and a replay keeps to its times and to the users' order."""

import asyncio
import itertools
from collections import defaultdict
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr.lab.estimates import percentile
from relaygr.lab.traffic import Traffic, Visit, replay, returning
from relaygr.serving.client import Response
from relaygr.serving.wire import Behaviour, RecommendedItem, RecommendReply

TRAFFIC = Traffic(users=10, requests=400, rate=50.0)


class Recorder:
    """A client that answers after a while and keeps what was asked."""

    def __init__(self, status: int = 200) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.answered: list[str] = []
        self._status = status

    async def request(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Response:
        question = msgspec.json.decode(body)
        self.asked.append((path, question))
        await asyncio.sleep(0)
        self.answered.append(question["user"])
        items = [RecommendedItem(1, 0.5)]
        reply = RecommendReply(
            items=items, path="FULL", decision="ADMIT", instance="s", used=3, epoch=0, engine_ms=1.0, stages_ms={}
        )
        return Response(self._status, {}, msgspec.json.encode(reply))


def test_visits_come_in_order_at_about_the_rate_and_users_return() -> None:
    visits = TRAFFIC.visits()
    times = [visit.at for visit in visits]
    assert times == sorted(times)
    assert 0.7 < len(visits) / times[-1] / TRAFFIC.rate < 1.4
    assert returning(visits) == 1 - 10 / 400
    for one, other in itertools.pairwise(visits):
        assert one.user != other.user


def test_newcomers_are_their_share_and_come_once() -> None:
    visits = Traffic(users=10, requests=1000, rate=50.0, newcomers=0.2).visits()
    new = [visit.user for visit in visits if int(visit.user.removeprefix("user-")) >= 10]
    assert 150 < len(new) < 250
    assert len(set(new)) == len(new)


def test_the_same_seed_draws_the_same_visits_and_another_seed_others() -> None:
    def shape(traffic: Traffic) -> list[tuple[float, str, list[int]]]:
        return [(v.at, v.user, [b.item for b in v.behaviours]) for v in traffic.visits()]

    assert shape(TRAFFIC) == shape(TRAFFIC)
    assert shape(TRAFFIC) != shape(Traffic(users=10, requests=400, rate=50.0, seed=1))


def test_behaviours_of_a_user_never_go_backwards() -> None:
    times = defaultdict[str, list[int]](list)
    for visit in TRAFFIC.visits():
        times[visit.user] += [behaviour.timestamp for behaviour in visit.behaviours]
    assert all(each == sorted(each) for each in times.values())
    assert sum(map(len, times.values())) > 200


def test_a_replay_sends_a_users_behaviours_before_the_request_that_is_to_see_them() -> None:
    visits = [Visit(0.0, "u1", (Behaviour(7, 1, 5),)), Visit(0.0, "u2", ()), Visit(0.0, "u1", (Behaviour(8, 1, 6),))]
    client = Recorder()
    answers = asyncio.run(replay(client, visits, 3))  # type: ignore[arg-type]  # as far as it is used
    own = [(path, body.get("behaviours")) for path, body in client.asked if body["user"] == "u1"]
    assert [path for path, _ in own] == ["/v1/behaviours", "/v1/recommend"] * 2
    assert [answer.visit for answer in answers] == visits
    assert [answer.scores for answer in answers] == [{1: 0.5}] * 3


def test_a_refused_request_is_an_answer_without_a_reply() -> None:
    (answer,) = asyncio.run(replay(Recorder(503), [Visit(0.0, "u1", ())], 3))  # type: ignore[arg-type]
    assert (answer.status, answer.reply, answer.scores) == (503, None, {})


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_a_percentile_is_a_value_that_so_many_do_not_exceed(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= len(values) * percent / 100


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (50, 2), (75, 3), (99, 4), (100, 4)])
def test_percentiles_of_four(percent: float, value: float) -> None:
    assert percentile([4, 2, 1, 3], percent) == value


def test_traffic_that_follows_other_traffic_is_newer_and_has_newcomers_of_its_own() -> None:
    times, new = defaultdict[str, list[int]](list), list[str]()
    for after in (0, 400):
        traffic = Traffic(users=10, requests=400, rate=50.0, newcomers=0.1, seed=after, after=after)
        for visit in traffic.visits():
            times[visit.user] += [behaviour.timestamp for behaviour in visit.behaviours]
            new += [visit.user] if int(visit.user.removeprefix("user-")) >= 10 else []
    assert all(each == sorted(each) for each in times.values())
    assert len(set(new)) == len(new)
