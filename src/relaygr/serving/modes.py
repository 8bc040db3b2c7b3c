"""The modes of the whole system: the relay, and what to compare it with. Each is a switch of the real thing."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from relaygr.config import EngineConfig, OnMiss
from relaygr.errors import InvalidInput
from relaygr.relay import RouterConfig, TriggerConfig, TriggerMode
from relaygr.shown import shown

__all__ = ["COMPARED", "Mode", "RelaySettings"]


class Mode(StrEnum):
    """What is pre-inferred, and what is kept between requests."""

    FULL = "full"
    """No signals, and nothing kept: every rank computes all of its history."""
    TRUNCATE = "truncate"
    """As `full`, but a history that would take too long is cut to its newest behaviours."""
    CACHE = "cache"
    """No signals: what ranks compute is kept in both tiers, and extended."""
    RELAY = "relay"
    """Signals; prefixes are kept in device memory, for requests with the very same history."""
    RELAY_HOST = "relay+host"
    """And in host memory."""
    RELAY_HOST_EXTEND = "relay+host+extend"
    """And are extended by new behaviours: all of the relay."""
    RANDOM_ROUTING = "random routing"
    """All of the relay, but every message goes to any slot."""
    ALWAYS_TRIGGER = "always trigger"
    """All of the relay, and a signal for every request that has a prefix."""
    NEVER_TRIGGER = "never trigger"
    """All of the relay, and no signals: what `cache` is, too."""

    @property
    def keeps(self) -> bool:
        """Whether anything is kept between requests."""
        return self not in (Mode.FULL, Mode.TRUNCATE)

    def engine(self, config: EngineConfig) -> EngineConfig:
        """An instance's engine in this mode."""
        if not self.keeps:
            on_miss: OnMiss = "truncate" if self is Mode.TRUNCATE else "full"
            return replace(config, reuse="none", host_cache="0", on_miss=on_miss)
        host_cache = "0" if self is Mode.RELAY else config.host_cache
        whole = self in (Mode.RELAY, Mode.RELAY_HOST)
        return replace(config, reuse="whole" if whole else "extend", host_cache=host_cache)

    def trigger(self, config: TriggerConfig) -> TriggerConfig:
        """A gateway's trigger in this mode."""
        if not self.keeps or self in (Mode.CACHE, Mode.NEVER_TRIGGER):
            return replace(config, mode=TriggerMode.NEVER)
        return replace(config, mode=TriggerMode.ALWAYS if self is Mode.ALWAYS_TRIGGER else TriggerMode.AT_RISK)

    def router(self, config: RouterConfig) -> RouterConfig:
        """A gateway's router in this mode."""
        return replace(config, affinity=self is not Mode.RANDOM_ROUTING)


COMPARED: Final = (Mode.FULL, Mode.CACHE, Mode.RELAY_HOST_EXTEND)
"""The relay, and what it has to beat."""


@dataclass(frozen=True)
class RelaySettings:
    """The relay as a whole. Gateway and instances must be in the same mode."""

    mode: Mode = Mode.RELAY_HOST_EXTEND
    """All of the relay; or, to compare with: "full" (nothing is kept between requests, no signals), "truncate" (the
    same, histories cut to what there is time for), "cache" (kept in both tiers, no signals), "relay" (kept in device
    memory alone, for the very same history), "relay+host" (and in host memory); "random routing", "always trigger",
    "never trigger"."""

    def __post_init__(self) -> None:
        if self.mode not in list(Mode):
            raise InvalidInput("mode", f"is {shown(self.mode)}; choose from {', '.join(Mode)}")
