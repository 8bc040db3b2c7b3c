"""What Serve is told to run, from the settings; nothing is started."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optional import require
from relaygr.errors import InvalidInput
from relaygr.serving.modes import Mode, RelaySettings
from relaygr.serving.ray_settings import DataPath, RaySettings
from relaygr.serving.settings import DataSettings, GatewaySettings, InstanceSettings, Settings

require("ray", "make test installs it where it can be had")

from ray.serve._private.build_app import build_app  # noqa: E402

from relaygr.cluster.ray.application import GATEWAY, INSTANCE, absolute, app, application  # noqa: E402
from relaygr.cluster.ray.autoscaling import RelayAutoscaling  # noqa: E402
from relaygr.cluster.ray.run import check_reach  # noqa: E402
from relaygr.cluster.ray.slot_router import SlotRouter  # noqa: E402


def built(settings: Settings) -> dict[str, Any]:
    made = build_app(application(settings), name="relaygr", default_runtime_env=None)
    return {deployment.name: deployment for deployment in made.deployments}


def test_instances_are_routed_by_our_router_with_the_settings_own_bounds() -> None:
    settings = Settings(relay=RelaySettings(Mode.RANDOM_ROUTING))
    settings = replace(settings, router=replace(settings.router, load_factor=2.0, quiet_tokens=7))
    config = built(settings)[INSTANCE]._deployment_config.request_router_config
    assert config.get_request_router_class() is SlotRouter
    assert config.request_router_kwargs == {"load_factor": 2.0, "quiet_tokens": 7, "affinity": False, "fail_after": 3}


def test_resources_health_and_drains_are_those_of_the_settings() -> None:
    own = RaySettings(instances=3, gateways=2, instance_cpus=4.0, gateway_cpus=0.5, health_period_s=1.5)
    settings = Settings(ray=own, instance=InstanceSettings(drain_s=30.0))
    made = built(replace(settings, engine=replace(settings.engine, device="cuda")))
    instance, gateway = made[INSTANCE], made[GATEWAY]
    assert (instance.num_replicas, gateway.num_replicas) == (3, 2)
    assert instance.ray_actor_options == {"num_cpus": 4.0, "num_gpus": 1.0}
    assert gateway.ray_actor_options["num_cpus"] == 0.5
    assert instance._deployment_config.health_check_period_s == 1.5
    assert instance._deployment_config.graceful_shutdown_timeout_s > 2 * 30.0
    assert instance._deployment_config.max_surge_percent == 0  # a slot is given away before it is taken
    assert gateway._deployment_config.max_surge_percent == 100  # another is there before one goes
    lone = built(replace(settings, ray=replace(own, instances=1)))
    assert lone[INSTANCE]._deployment_config.max_surge_percent == 100


def test_scaling_is_ours_and_only_where_there_may_be_more() -> None:
    assert built(Settings())[INSTANCE]._deployment_config.autoscaling_config is None
    own = RaySettings(instances=2, max_instances=5, busy_target=0.4, downscale_delay_s=60.0)
    scaling = built(Settings(ray=own))[INSTANCE]._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.downscale_delay_s) == (2, 5, 60.0)
    assert scaling.policy.policy_kwargs == {"busy_target": 0.4, "leased_target": 0.5}
    assert scaling.policy.get_policy().__name__ == RelayAutoscaling.__name__


def test_without_a_gateway_the_instances_are_what_serve_exposes() -> None:
    assert set(built(Settings(ray=RaySettings(gateways=0)))) == {INSTANCE}


def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"gateway\.instances"):
        application(Settings(gateway=GatewaySettings(instances={"slot-0": "http://127.0.0.1:8100"})))
    with pytest.raises(InvalidInput, match="confog"):
        app({"confog": str(tmp_path)})
    with pytest.raises(InvalidInput, match=r"missing\.toml"):
        app({"config": str(tmp_path / "missing.toml")})


def test_paths_mean_the_same_wherever_a_process_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = absolute(Settings(data=DataSettings("model.safetensors", "/items", "redis://store:6379/0")))
    assert made.data == DataSettings(str(tmp_path / "model.safetensors"), "/items", "redis://store:6379/0")
    assert made.admin.token_file is None


@pytest.mark.parametrize(
    ("settings", "machines", "field"),
    [
        (Settings(), 1, None),
        (Settings(data=DataSettings(store="store")), 1, None),
        (Settings(), 2, "instance.host"),
        (Settings(instance=InstanceSettings(host="0.0.0.0")), 2, None),
        (Settings(ray=RaySettings(data_path=DataPath.HANDLE)), 2, None),
        (Settings(ray=RaySettings(data_path=DataPath.HANDLE), data=DataSettings(store="store")), 2, "data.store"),
        (Settings(ray=RaySettings(data_path=DataPath.HANDLE), data=DataSettings(store="redis://s:1/0")), 2, None),
    ],
)
def test_what_other_machines_could_not_reach_is_refused(settings: Settings, machines: int, field: str | None) -> None:
    if field is None:
        check_reach(settings, machines)
        return
    with pytest.raises(InvalidInput) as caught:
        check_reach(settings, machines)
    assert caught.value.field == field
