"""Trigger, router and membership: pure policies of the gateway. Time is passed in; nothing here does I/O."""

from relaygr.relay.membership import Evidence, Health, Member, Membership, MembershipConfig, Transition
from relaygr.relay.router import Placement, Route, Router, RouterConfig
from relaygr.relay.trigger import Forecast, Shape, SlotReport, Trigger, TriggerConfig, TriggerMode, Verdict

__all__ = [
    "Evidence",
    "Forecast",
    "Health",
    "Member",
    "Membership",
    "MembershipConfig",
    "Placement",
    "Route",
    "Router",
    "RouterConfig",
    "Shape",
    "SlotReport",
    "Transition",
    "Trigger",
    "TriggerConfig",
    "TriggerMode",
    "Verdict",
]
