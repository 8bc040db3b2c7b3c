"""The Serve application: a gateway deployment over an instance deployment, from the one file of settings."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from relaygr.cluster.ray.autoscaling import RelayAutoscaling
from relaygr.cluster.ray.gateway import Gateway
from relaygr.cluster.ray.instance import LINGER_S, Instance
from relaygr.errors import InvalidInput
from relaygr.serving.settings import DataSettings, Settings, read

__all__ = ["APP", "GATEWAY", "INSTANCE", "QUIET", "app", "application"]

APP: Final = "relaygr"
"""The name of the application where none is given."""
GATEWAY: Final = "Gateway"
INSTANCE: Final = "Instance"
AT_ONCE: Final = 10_000
"""Calls that Serve passes to a replica before it holds some back: gateways and engines have bounds of their own."""
QUIET: Final = {"enable_access_log": False}
"""No line of log for every request: `/metrics` counts them. Serve's own files can turn it on."""
STATS_S: Final = 1.0
"""How often Serve asks an instance whether it drains, and how busy it is."""


def app(arguments: dict[str, str]) -> Any:
    """For `serve run relaygr.cluster.ray:app config=relay.toml`, and for Serve's configuration files.

    `config` names the settings, whose paths are those of the machines that Ray runs on.
    """
    unknown = set(arguments) - {"config"}
    if unknown:
        raise InvalidInput(min(unknown), "is no argument; there is config")
    file = arguments.get("config")
    return application(absolute(read(file)))


def absolute(settings: Settings) -> Settings:
    """With paths that mean the same wherever a process of Ray is started."""

    def path(name: str | None) -> str | None:
        return name if name is None or "://" in name else str(Path(name).absolute())

    data, token = settings.data, settings.admin.token_file
    return replace(
        settings,
        data=DataSettings(path(data.model), path(data.catalogue), path(data.store)),
        admin=replace(settings.admin, token_file=path(token)),
    )


def application(settings: Settings, instance: type[Any] = Instance) -> Any:
    """The application for these settings, whose paths are absolute. `instance`: the class of its instances.

    Raises InvalidInput for settings that Ray cannot serve.
    """
    if settings.gateway.instances:
        raise InvalidInput("gateway.instances", "are for `serve gateway`; Ray starts its own: remove them")
    own = settings.ray
    instances = serve.deployment(
        serve.ingress()(instance) if own.gateways == 0 else instance, **_instance_options(settings)
    ).bind(settings)
    if own.gateways == 0:
        return instances
    gateway = serve.deployment(
        serve.ingress()(Gateway),
        name=GATEWAY,
        num_replicas=own.gateways,
        ray_actor_options={"num_cpus": own.gateway_cpus},
        max_surge_percent=100,  # another is there before one goes
        **_common(settings.gateway.drain_s),
    )
    return gateway.bind(settings, instances)


def _instance_options(settings: Settings) -> dict[str, Any]:
    own, mode = settings.ray, settings.in_mode
    router = {**asdict(mode.router), **asdict(mode.membership)}
    options: dict[str, Any] = {
        "name": INSTANCE,
        "ray_actor_options": {"num_cpus": own.instance_cpus, "num_gpus": own.gpus(settings.engine.device)},
        "health_check_period_s": own.health_period_s,
        "health_check_timeout_s": own.health_timeout_s,
        "request_router_config": RequestRouterConfig(
            request_router_class="relaygr.cluster.ray.request_router.SlotRouter",
            request_router_kwargs=router,
            request_routing_stats_period_s=STATS_S,
        ),
        # One after the other: a slot is given away before it is taken again. A lone one is replaced first.
        "max_surge_percent": 100 if own.instances == 1 else 0,
        **_common(settings.instance.drain_s),
    }
    if own.max_instances is None:
        return {**options, "num_replicas": own.instances}
    policy = AutoscalingPolicy(
        policy_function=RelayAutoscaling,
        policy_kwargs={"busy_target": own.busy_target, "leased_target": own.leased_target},
    )
    scaling = AutoscalingConfig(
        min_replicas=own.instances,
        max_replicas=own.max_instances,
        upscale_delay_s=own.upscale_delay_s,
        downscale_delay_s=own.downscale_delay_s,
        metrics_interval_s=STATS_S,
        look_back_period_s=max(own.upscale_delay_s, STATS_S),
        policy=policy,
    )
    return {**options, "autoscaling_config": scaling}


def _common(drain_s: float) -> dict[str, Any]:
    return {
        "max_ongoing_requests": AT_ONCE,
        "logging_config": QUIET,
        "graceful_shutdown_wait_loop_s": 0.1,
        # An instance lingers, drains, and ends its engine; and a little more than that.
        "graceful_shutdown_timeout_s": LINGER_S + 2 * drain_s + 5.0,
    }
