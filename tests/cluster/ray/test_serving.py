"""Gateways and instances on a real Ray Serve: many requests at once, engines that die, upgrades, scaling, stops.

Every answer's scores are compared with the oracle. The tests follow one another on the same application.
"""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from deployments import TOKEN, WITHIN_S, free_port, until
from optional import require
from oracle import assert_scores, oracle_scores
from relay_load import MODELS, USERS, history, saved
from relaygr import History
from relaygr.cascade.catalogue import Catalogue
from relaygr.history import open_store
from relaygr.serving.ray_settings import DataPath
from relaygr.serving.settings import Settings, render

require("ray", "make test installs it where it can be had")

import ray  # noqa: E402
from ray import serve  # noqa: E402
from ray.serve.schema import ServeDeploySchema  # noqa: E402

from ray_fleet import settings_for, table  # noqa: E402
from relaygr.cluster.ray.application import APP, INSTANCE  # noqa: E402
from relaygr.cluster.ray.directory import NAMESPACE  # noqa: E402
from relaygr.cluster.ray.handle_client import HandleClient  # noqa: E402
from relaygr.cluster.ray.run import deploy  # noqa: E402

pytestmark = pytest.mark.ray
ITEMS = np.arange(100)
TEXT = """
[data]
model = "{folder}/a.safetensors"
store = "{folder}/store"
catalogue = "{folder}/items.safetensors"
[relay]
mode = "always trigger"
[cascade]
pipeline_budget_ms = 60000
ranking_budget_ms = 50000
candidates = 32
retrieve = 100
[engine]
device_cache = "16MiB"
host_cache = "16MiB"
[instance]
threads = 1
[ray]
data_path = "handle"
health_period_s = 0.5
health_timeout_s = 60.0
upscale_delay_s = 0.5
downscale_delay_s = 1.0
"""


@cache
def lived(user: str) -> History:
    """A history that leaves items to recommend."""
    known = history(user)
    return History(known.items % 40, known.actions, known.timestamps)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Models, items and users; two instances and a gateway that calls them by handle."""
    folder = saved(tmp_path_factory.mktemp("world"))
    vectors = np.random.default_rng(0).normal(size=(len(ITEMS), 8)).astype(np.float32)
    Catalogue(ITEMS, vectors).save(folder / "items.safetensors")
    with open_store(str(folder / "store")) as store:
        for user in USERS:
            known = lived(user)
            store.append(user, known.items, known.actions, known.timestamps)
    return settings_for(folder, TEXT.format(folder=folder))


@pytest.fixture(scope="module")
def served(ray_running: str, world: Settings) -> Iterator[str]:
    """The address of what serves them."""
    deploy(world)
    yield ray_running
    serve.delete(APP)


def model_of(settings: Settings, name: str) -> Settings:
    assert settings.data.model is not None
    return replace(settings, data=replace(settings.data, model=str(Path(settings.data.model).with_name(name))))


# ---- asking


def check(reply: httpx.Response, user: str, models: str) -> Any:
    """An answer with the scores of one of these models; returns it."""
    assert reply.status_code == 200, reply.text
    told = reply.json()
    assert len(told["items"]) == 3
    items, scores = (np.array([each[part] for each in told["items"]]) for part in ("item", "score"))
    failures = []
    for name in models:
        try:
            assert_scores(scores[:, None], oracle_scores(MODELS[name], lived(user), items))
            return told
        except AssertionError as failure:
            failures.append(failure)
    raise failures[0]


async def recommend(client: httpx.AsyncClient, user: str, models: str = "a") -> Any:
    return check(await client.post("/v1/recommend", json={"user": user, "k": 3}), user, models)


@contextlib.asynccontextmanager
async def asking(address: str, models: str, senders: int = 4) -> AsyncIterator[list[Any]]:
    """Senders who ask without a pause and do not retry; gives the answers so far. None may fail."""
    answers: list[Any] = []
    stop = False

    async def send(seed: int) -> None:
        draw = random.Random(seed)
        while not stop:
            answers.append(await recommend(client, draw.choice(USERS), models))

    async with httpx.AsyncClient(base_url=address, timeout=WITHIN_S) as client:
        tasks = [asyncio.create_task(send(seed)) for seed in range(senders)]
        try:
            yield answers
        finally:
            stop = True
            await asyncio.gather(*tasks)


async def more(answers: list[Any], count: int) -> None:
    wanted = len(answers) + count

    async def answered() -> bool:
        return len(answers) >= wanted

    await until(answered)


def engine_of(pid: int) -> int:
    """The engine process of an instance."""
    children = [
        child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    (engine,) = [child for child in children if b"engine_server" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return int(engine)


def test_64_concurrent_recommends_finish_by_handle(served: str) -> None:
    async def main() -> None:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=served, timeout=WITHIN_S, limits=limits) as client:

            async def both() -> bool:  # a gateway begins as soon as one of them is up
                return bool((await client.get("/v1/status")).json()["ready_slots"] == 2)

            await until(both)
            answers = await asyncio.gather(*(recommend(client, USERS[n % len(USERS)]) for n in range(64)))
        assert {answer["instance"] for answer in answers} == {"slot-0", "slot-1"}

    asyncio.run(main())


def test_a_bare_handle_keeps_a_user_s_messages_together_and_calls_meet_at_the_carried_slot(served: str) -> None:
    async def main() -> None:
        client = HandleClient(serve.get_deployment_handle(INSTANCE, APP))
        for user in USERS[:6]:
            slots = set()
            for _ in range(3):
                slots.add(
                    (await client.request("GET", "/readyz", b"", {"x-relaygr-key": user})).headers["x-relaygr-slot"]
                )
            assert len(slots) == 1
        for slot in table():
            named = {"x-relaygr-key": "user-1", "x-relaygr-slot": slot}
            assert (await client.request("GET", "/readyz", b"", named)).headers["x-relaygr-slot"] == slot

    asyncio.run(main())


def test_evicting_a_user_by_handle_reaches_every_instance_and_prometheus_finds_them(served: str) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=served, timeout=WITHIN_S) as client:
        gone = client.post("/v1/admin/evict", json={"user": "nobody"}, headers=headers)
        assert (gone.status_code, gone.json()["prefixes"]) == (200, {"slot-0": 0, "slot-1": 0})
        found = client.get("/v1/targets").json()
    assert [each["labels"]["slot"] for each in found] == ["slot-0", "slot-1"]
    for each in found:
        told = httpx.get(f"http://{each['targets'][0]}/metrics", timeout=WITHIN_S).text
        assert f'relaygr_engine_up{{slot="{each["labels"]["slot"]}"}} 1.0' in told


def test_an_engine_that_dies_fails_no_request_and_its_instance_is_started_anew_under_its_slot(served: str) -> None:
    async def main() -> None:
        before = table()
        async with asking(served, "a") as answers:
            await more(answers, 10)
            os.kill(engine_of(before["slot-0"].pid), signal.SIGKILL)

            async def anew() -> bool:
                now = await asyncio.to_thread(table)
                return "slot-0" in now and now["slot-0"].pid != before["slot-0"].pid

            await until(anew)
            count = len(answers)

            async def back() -> bool:
                return any(answer["instance"] == "slot-0" for answer in answers[count:])

            await until(back)
        after = table()
        assert sorted(after) == ["slot-0", "slot-1"]
        assert after["slot-1"] == before["slot-1"]

    asyncio.run(main())


def test_a_directory_that_is_lost_learns_again_who_holds_what(served: str) -> None:
    async def main() -> None:
        before = table()
        async with asking(served, "a") as answers:
            ray.kill(ray.get_actor(f"relaygr-slots-{APP}", namespace=NAMESPACE), no_restart=False)

            async def known() -> bool:
                return sorted(await asyncio.to_thread(table)) == sorted(before)

            await until(known)
            await more(answers, 10)

    asyncio.run(main())


def test_an_upgrade_to_another_model_and_data_path_fails_no_request_and_keeps_the_slots(
    served: str, world: Settings
) -> None:
    upgraded = model_of(world, "b.safetensors")
    upgraded = replace(
        upgraded, ray=replace(upgraded.ray, data_path=DataPath.DIRECT, max_instances=3, busy_target=1e-4)
    )

    async def main() -> None:
        before = table()
        async with asking(served, "ab") as answers:
            await more(answers, 10)
            await joined(upgraded)
            await more(answers, 10)
        after = table()
        assert set(before) <= set(after)
        assert not {held.pid for held in before.values()} & {held.pid for held in after.values()}
        async with httpx.AsyncClient(base_url=served, timeout=WITHIN_S) as client:
            await asyncio.gather(*(recommend(client, USERS[n % len(USERS)], "b") for n in range(64)))
            slots = (await client.get("/v1/status")).json()["slots"]
        assert all(told["address"].startswith("http://") for told in slots.values())

    asyncio.run(main())


async def joined(settings: Settings) -> None:
    """`relaygr serve ray --address`, as an operator upgrades what a cluster serves; it returns once that is healthy."""
    assert settings.data.model is not None
    file = Path(settings.data.model).with_name("upgraded.toml")
    file.write_text(render(settings))
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "relaygr", "serve", "ray", "--config", str(file), "--address", address]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    assert b"gateway serves on http://" in out


def test_busy_devices_get_another_instance_and_idle_ones_lose_it_again_drained(served: str) -> None:
    async def main() -> None:
        async def three() -> bool:
            return len(await asyncio.to_thread(table)) == 3

        async def two() -> bool:
            return len(await asyncio.to_thread(table)) == 2

        async with asking(served, "b") as answers:
            await until(three)
            count = len(answers)

            async def all_answer() -> bool:
                return {answer["instance"] for answer in answers[count:]} == set(table())

            await until(all_answer)
        await until(two)
        async with httpx.AsyncClient(base_url=served, timeout=WITHIN_S) as client:
            await asyncio.gather(*(recommend(client, user, "b") for user in USERS))

    asyncio.run(main())


# ---- other ways to begin and to end


def test_serve_s_own_configuration_runs_it_and_swaps_a_model_in_place(ray_running: str, world: Settings) -> None:
    assert world.data.model is not None
    folder = Path(world.data.model).parent
    file = folder / "declared.toml"
    file.write_text(render(replace(world, ray=replace(world.ray, gateways=0, instances=1))))

    def declare(model: str) -> None:
        from ray.serve.context import _get_global_client

        change = {"name": INSTANCE, "user_config": {"model": str(folder / model)}}
        app = {
            "name": "declared",
            "route_prefix": "/declared",
            "import_path": "relaygr.cluster.ray:app",
            "args": {"config": str(file)},
            "deployments": [change],
        }
        client = _get_global_client()
        client.deploy_apps(ServeDeploySchema.model_validate({"applications": [app]}))
        client._wait_for_application_running("declared")

    async def version() -> Any:
        async with httpx.AsyncClient(base_url=ray_running, timeout=WITHIN_S) as client:
            status = (await client.get("/declared/v1/status")).json()
            return status["engine"]["version"], status["up_s"]

    async def started_anew() -> None:
        """Killed, it takes no work before it has the model that it was told last, whatever the file says."""
        old = table("declared")["slot-0"]
        os.kill(old.pid, signal.SIGKILL)

        async def takes_work() -> bool:
            now = (await asyncio.to_thread(table, "declared")).get("slot-0", old)
            if now == old:
                return False
            status = (await asyncio.to_thread(httpx.get, f"{now.address}/v1/status", timeout=WITHIN_S)).json()
            assert status["draining"] or status["engine"]["version"] == MODELS["b"].version()
            return not status["draining"]

        await until(takes_work)

    try:
        declare("a.safetensors")
        first, up = asyncio.run(version())
        assert first == MODELS["a"].version()
        declare("b.safetensors")

        async def swapped() -> bool:
            return bool((await version())[0] == MODELS["b"].version())

        asyncio.run(until(swapped))
        assert asyncio.run(version())[1] > up  # it was not started anew
        asyncio.run(started_anew())
    finally:
        serve.delete("declared")
        ray.kill(ray.get_actor("relaygr-slots-declared", namespace=NAMESPACE))


def test_the_command_starts_ray_serves_and_leaves_nothing_behind(world: Settings, tmp_path: Path) -> None:
    simulated = replace(world, engine=replace(world.engine, device="simulated"), ray=replace(world.ray, instances=1))
    file, mark, port = tmp_path / "relay.toml", f"relaygr-test-{uuid.uuid4()}", free_port()
    file.write_text(render(simulated))
    silent = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RELAYGR_MARK": mark}
    command = [sys.executable, "-m", "relaygr", "serve", "ray", "--config", str(file), "--port", str(port)]
    with subprocess.Popen(
        command, env=os.environ | silent, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            said = iter(process.stdout.readline, "")  # Ray says other things there, too
            assert f"gateway serves on http://127.0.0.1:{port}\n" in said
            asked = {"user": "user-1", "k": 2}
            reply = httpx.post(f"http://127.0.0.1:{port}/v1/recommend", json=asked, timeout=WITHIN_S)
            assert reply.status_code == 200, reply.text
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(WITHIN_S) == 0

    async def gone() -> bool:
        return not left_with(mark)

    asyncio.run(until(gone))


def left_with(mark: str) -> list[str]:
    """Processes that have it in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text())
    return found
