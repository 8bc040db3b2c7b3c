"""What `[ray]` may say; no Ray is needed for it."""

from typing import Any

import pytest

from relaygr.errors import InvalidInput
from relaygr.serving.ray_settings import DataPath, RaySettings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("instances", 0),
        ("max_instances", 1),
        ("gateways", -1),
        ("data_path", "pigeon"),
        ("instance_cpus", -0.5),
        ("instance_gpus", float("inf")),
        ("gateway_cpus", float("nan")),
        ("busy_target", 0.0),
        ("leased_target", 1.5),
        ("upscale_delay_s", -1.0),
        ("downscale_delay_s", float("inf")),
        ("health_period_s", 0.0),
        ("health_timeout_s", -3.0),
    ],
)
def test_what_cannot_be_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        RaySettings(**{field: value})
    assert caught.value.field == field


def test_an_instance_has_a_gpu_where_its_engine_runs_on_one_unless_told_otherwise() -> None:
    assert RaySettings().gpus("cpu") == 0.0
    assert RaySettings().gpus("cuda:1") == 1.0
    assert RaySettings(instance_gpus=0.5).gpus("cuda") == 0.5
    assert RaySettings(instance_gpus=0.0).gpus("cuda") == 0.0
    assert RaySettings(data_path=DataPath.HANDLE).data_path == "handle"
