"""Which slots there are, where they answer, and which of them are fit for work."""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from relaygr.errors import InvalidInput, Unavailable
from relaygr.relay.checks import integer

__all__ = ["Evidence", "Health", "Member", "Membership", "MembershipConfig", "Transition"]


class Health(StrEnum):
    """What a slot is fit for."""

    JOINING = "JOINING"
    """Not heard from yet: no work."""
    UP = "UP"
    """Takes new requests."""
    DRAINING = "DRAINING"
    """Finishes what it has: later messages of its requests, no new ones."""
    DOWN = "DOWN"
    """No work until a probe finds it ready."""


class Evidence(StrEnum):
    """What a probe or a request showed about a slot.

    A request that ran out of its own deadline shows nothing: a slow slot is not a dead one, and taking its load to the
    others would slow them too.
    """

    READY = "READY"
    """A probe found it ready for work."""
    ANSWERED = "ANSWERED"
    """A request was answered, if only with a refusal."""
    DRAINING = "DRAINING"
    """It answered that it takes no new requests."""
    FAILED = "FAILED"
    """A probe was not answered, or a connection broke."""
    REFUSED = "REFUSED"
    """Nobody listens there."""


class Transition(StrEnum):
    """What happened to a slot; each is counted."""

    ADDED = "ADDED"
    READDRESSED = "READDRESSED"
    """It answers elsewhere now, and joins anew."""
    CAME_UP = "CAME_UP"
    STARTED_DRAINING = "STARTED_DRAINING"
    FAILED = "FAILED"
    """It went down after too many failures in a row."""
    REFUSED = "REFUSED"
    """It went down at a refused connection."""
    REMOVED = "REMOVED"


@dataclass(frozen=True)
class MembershipConfig:
    """When a slot counts as down."""

    fail_after: int = 3
    """Failures in a row after which a slot is down. A refused connection takes it down at once."""

    def __post_init__(self) -> None:
        integer("fail_after", self.fail_after, at_least=1)


@dataclass
class Member:
    """A slot as it stands now. Its membership alone changes it."""

    slot: str
    """Its stable name: keys belong to the name, whoever answers under it."""
    address: str
    health: Health = Health.JOINING
    failures: int = 0
    """Failures in a row."""


class Membership:
    """Slots and their health, as evidence from outside has it. Sends nothing and knows no time.

    ```
    JOINING ── READY ──▶ UP ── DRAINING ──▶ DRAINING
                         ▲                     │
                         └─────── READY ───────┤
                         │                     │
                         └─ READY ── DOWN ◀────┘  from anywhere: REFUSED, or fail_after × FAILED in a row
    ```

    Only a probe brings a slot up. An answered request ends a run of failures and no more: a slot that stopped listening
    still answers what it has accepted.
    """

    def __init__(self, config: MembershipConfig | None = None) -> None:
        self.config = config or MembershipConfig()
        self.version = 0
        """Goes up with every transition."""
        self.transitions: Counter[Transition] = Counter()
        self._members: dict[str, Member] = {}
        self._placeable: tuple[str, ...] = ()

    def add(self, slot: str, address: str) -> Transition | None:
        """A slot joins, or answers at another address from now on; None where nothing is new."""
        if not slot:
            raise InvalidInput("slot", "must not be empty")
        known = self._members.get(slot)
        if known and known.address == address:
            return None
        self._members[slot] = Member(slot, address)
        return self._count(Transition.READDRESSED if known else Transition.ADDED)

    def remove(self, slot: str) -> Transition | None:
        """A slot leaves for good; None if it was not there."""
        return self._count(Transition.REMOVED) if self._members.pop(slot, None) else None

    def observe(self, slot: str, evidence: Evidence) -> Transition | None:
        """What that changed; None for nothing. Evidence about a slot that has left is ignored."""
        member = self._members.get(slot)
        if member is None:
            return None
        member.failures = member.failures + 1 if evidence in _AGAINST else 0
        match evidence:
            case Evidence.READY:
                return self._turn(member, Health.UP, Transition.CAME_UP)
            case Evidence.DRAINING:
                return self._turn(member, Health.DRAINING, Transition.STARTED_DRAINING)
            case Evidence.REFUSED:
                return self._turn(member, Health.DOWN, Transition.REFUSED)
            case Evidence.FAILED if member.failures >= self.config.fail_after:
                return self._turn(member, Health.DOWN, Transition.FAILED)
            case _:
                return None

    @property
    def placeable(self) -> tuple[str, ...]:
        """The slots that take new requests, by name."""
        return self._placeable

    def follows(self, slot: str) -> bool:
        """Whether later messages of the slot's requests may go there."""
        member = self._members.get(slot)
        return member is not None and member.health in (Health.UP, Health.DRAINING)

    def address(self, slot: str) -> str:
        """Where the slot answers; Unavailable if there is no such slot."""
        member = self._members.get(slot)
        if member is None:
            raise Unavailable(f"slot {slot!r} is not a member")
        return member.address

    def health(self, slot: str) -> Health | None:
        """None if there is no such slot."""
        member = self._members.get(slot)
        return member.health if member else None

    def members(self) -> tuple[Member, ...]:
        """All slots, by name."""
        return tuple(self._members[slot] for slot in sorted(self._members))

    def __contains__(self, slot: object) -> bool:
        return slot in self._members

    def __len__(self) -> int:
        return len(self._members)

    def _turn(self, member: Member, health: Health, transition: Transition) -> Transition | None:
        if member.health is health:
            return None
        member.health = health
        return self._count(transition)

    def _count(self, transition: Transition) -> Transition:
        self.version += 1
        self.transitions[transition] += 1
        self._placeable = tuple(member.slot for member in self.members() if member.health is Health.UP)
        return transition


_AGAINST = (Evidence.FAILED, Evidence.REFUSED)
