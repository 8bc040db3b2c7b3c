"""What `serve ray` is told beside what every server is: no Ray is needed to read it."""

import math
from dataclasses import dataclass
from enum import StrEnum

from relaygr.errors import InvalidInput
from relaygr.shown import shown

__all__ = ["DataPath", "RaySettings"]


class DataPath(StrEnum):
    """What carries signals and ranks from a gateway to the instances that Ray has placed."""

    DIRECT = "direct"
    """HTTP between their processes: Ray places, restarts and scales them, and is not asked for a message."""
    HANDLE = "handle"
    """Calls of Ray Serve, by its own ports and with its own encryption, routed by our router inside Serve."""


@dataclass(frozen=True)
class RaySettings:
    """Ray Serve: how many of what it runs, and when it runs more. Read by `serve ray` alone."""

    instances: int = 2
    """Instances to begin with, and the fewest there are."""
    max_instances: int | None = None
    """The most there may be, as device time and leased memory ask for. None: as many as to begin with, always."""
    gateways: int = 1
    """Gateways behind Serve's proxy. 0: none, and the instances themselves answer there, for a cascade of your own."""
    instance_cpus: float = 1.0
    """Processors that Ray sets aside for an instance."""
    instance_gpus: float | None = None
    """GPUs that Ray sets aside for an instance. None: one where the engine's device is cuda, else none."""
    gateway_cpus: float = 1.0
    """Processors that Ray sets aside for a gateway."""
    data_path: DataPath = DataPath.DIRECT
    """What carries signals and ranks: direct, HTTP between the processes; handle, calls of Ray Serve."""
    busy_target: float = 0.6
    """The share of its time that a device should be busy: instances are added above, and taken away below."""
    leased_target: float = 0.5
    """The share of device memory that leases should hold, likewise."""
    upscale_delay_s: float = 10.0
    """How long more instances must be called for before there are more."""
    downscale_delay_s: float = 300.0
    """How long fewer must do before there are fewer: what they have cached goes with them."""
    health_period_s: float = 2.0
    """How often Ray asks an instance whether its engine is alive."""
    health_timeout_s: float = 10.0
    """How long it waits for the answer before it starts the instance anew."""

    def __post_init__(self) -> None:
        if self.instances < 1:
            raise InvalidInput("instances", f"must be at least 1, not {self.instances}")
        if self.max_instances is not None and self.max_instances < self.instances:
            raise InvalidInput("max_instances", f"must be at least instances, {self.instances}")
        if self.gateways < 0:
            raise InvalidInput("gateways", "must not be negative")
        if self.data_path not in list(DataPath):
            raise InvalidInput("data_path", f"is {shown(self.data_path)}; there are {', '.join(DataPath)}")
        for name in ("instance_cpus", "instance_gpus", "gateway_cpus", "upscale_delay_s", "downscale_delay_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise InvalidInput(name, "must be finite and not negative")
        for name in ("busy_target", "leased_target"):
            if not 0 < getattr(self, name) <= 1:
                raise InvalidInput(name, "must be above 0 and at most 1")
        for name in ("health_period_s", "health_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidInput(name, "must be positive and finite")

    def gpus(self, device: str) -> float:
        """Those of an instance whose engine runs on this device."""
        if self.instance_gpus is not None:
            return self.instance_gpus
        return 1.0 if device.startswith("cuda") else 0.0
