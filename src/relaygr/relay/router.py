"""Which slot a request goes to: its key's own slot, the next in its order when that one is full, and the same again."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import repeat
from types import TracebackType
from typing import Self

import xxhash

from relaygr.errors import InvalidInput, Unavailable
from relaygr.relay.checks import integer, number
from relaygr.relay.membership import Membership

__all__ = ["Placement", "Route", "Router", "RouterConfig"]


class Placement(StrEnum):
    """How a message came to its slot; each is counted."""

    PLACED = "PLACED"
    """The first slot in its key's order."""
    OVERFLOWED = "OVERFLOWED"
    """A later one: those before it had too much load."""
    FOLLOWED = "FOLLOWED"
    """The slot that was named."""
    MOVED = "MOVED"
    """The slot that was named is gone, so it was placed anew."""
    SCATTERED = "SCATTERED"
    """Any slot: there is no affinity."""


@dataclass(frozen=True)
class RouterConfig:
    """How far keys may be kept together at the cost of even load."""

    load_factor: float = 1.25
    """A slot takes no new request once its load has reached this many times the mean over the live slots."""
    quiet_tokens: int = 0
    """Below this load a slot takes its own keys whatever the mean. With few requests under way the mean is close to
    nothing and would send keys away from slots that are all but idle; 0: the mean alone decides."""

    affinity: bool = True
    """Whether a key keeps to its slot and later messages follow the first; False: each goes to any slot, a control."""

    def __post_init__(self) -> None:
        if number("load_factor", self.load_factor) < 1:
            raise InvalidInput("load_factor", f"must be at least 1, not {self.load_factor}: the mean must fit")
        integer("quiet_tokens", self.quiet_tokens, at_least=0)


class _Load:
    """Tokens dispatched under a slot's name and not yet answered."""

    __slots__ = ("seed", "slot", "tokens")

    def __init__(self, slot: str) -> None:
        self.slot = slot
        self.seed = xxhash.xxh3_64_intdigest(_encoded(slot))
        self.tokens = 0


class Route:
    """Where one message goes. The slot is charged with it until `release`; releasing twice does nothing.

    A context manager: `with router.place(user, tokens) as route: await send(route.address, …)`.
    """

    __slots__ = ("_load", "address", "placement", "tokens")

    def __init__(self, load: _Load, address: str, placement: Placement, tokens: int) -> None:
        self.address = address
        self.placement = placement
        self.tokens = tokens
        """What the slot is charged; 0 once released."""
        self._load = load
        load.tokens += tokens

    @property
    def slot(self) -> str:
        return self._load.slot

    def release(self) -> None:
        self._load.tokens -= self.tokens
        self.tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Route({self.slot!r}, {self.placement}, tokens={self.tokens})"


class Router:
    """Consistent hashing with bounded load over the slots of a membership.

    Every key has its own order over slot names (rendezvous hashing), so a slot that leaves moves its own keys and no
    others, spreads them over all that stay, and has them again when it comes back. A request goes to the first slot in
    that order whose load is below `load_factor` × the mean over the live slots, the request itself counted in the mean:
    the least loaded slot always is. Load is what this router has dispatched and not seen answered, in tokens.
    """

    def __init__(self, membership: Membership, config: RouterConfig | None = None) -> None:
        self.config = config or RouterConfig()
        self.placements: Counter[Placement] = Counter()
        self._membership = membership
        self._version = -1
        self._live: list[_Load] = []
        self._seeds: list[int] = []
        self._loads: dict[str, _Load] = {}

    def place(self, key: str, tokens: int) -> Route:
        """Where a request's first message goes. Unavailable if no slot is up; then nothing changed."""
        tokens = _weight(tokens)
        load, placement = self._choose(key, tokens)
        return self._charge(load, placement, tokens)

    def follow(self, slot: str, key: str, tokens: int) -> Route:
        """Where a later message goes: to `slot`, named by the answer to the first, whatever its load, while it lives.

        Else it is placed anew, and the route says MOVED. Unavailable if no slot is up; then nothing changed.
        """
        tokens = _weight(tokens)
        if not self.config.affinity:
            return self.place(key, tokens)
        if self._membership.follows(slot):
            self._refresh()
            return self._charge(self._load(slot), Placement.FOLLOWED, tokens)
        load, _ = self._choose(key, tokens)
        return self._charge(load, Placement.MOVED, tokens)

    def peek(self, key: str, tokens: int) -> str:
        """The slot `place` would take now. Charges and counts nothing; Unavailable if no slot is up."""
        return self._choose(key, _weight(tokens))[0].slot

    def order(self, key: str) -> tuple[str, ...]:
        """The slots that are up, in the key's order."""
        live = self._refresh()
        return tuple(live[index].slot for index in _ordered(_ranks(key, self._seeds)))

    def loads(self) -> dict[str, int]:
        """Tokens under way by slot, those of slots that have left included until they are released."""
        self._refresh()
        return {load.slot: load.tokens for load in self._loads.values()}

    def _choose(self, key: str, tokens: int) -> tuple[_Load, Placement]:
        live = self._refresh()
        if not live:
            raise Unavailable("no slot is up")
        if not self.config.affinity:
            draw = xxhash.xxh3_64_intdigest(_encoded(key), sum(self.placements.values()))
            return live[draw % len(live)], Placement.SCATTERED
        mean = (sum([load.tokens for load in live]) + tokens) / len(live)
        limit = max(self.config.load_factor * mean, self.config.quiet_tokens)
        ranks = _ranks(key, self._seeds)
        first = live[ranks.index(min(ranks))]
        if first.tokens < limit:
            return first, Placement.PLACED
        return next(live[index] for index in _ordered(ranks) if live[index].tokens < limit), Placement.OVERFLOWED

    def _charge(self, load: _Load, placement: Placement, tokens: int) -> Route:
        self.placements[placement] += 1
        return Route(load, self._membership.address(load.slot), placement, tokens)

    def _refresh(self) -> list[_Load]:
        """The loads of the slots that are up, by name; brought up to date if the membership has changed."""
        if self._version != self._membership.version:
            self._version = self._membership.version
            self._live = [self._load(slot) for slot in self._membership.placeable]
            self._seeds = [load.seed for load in self._live]
            self._loads = {
                load.slot: load for load in self._loads.values() if load.tokens or load.slot in self._membership
            }
        return self._live

    def _load(self, slot: str) -> _Load:
        load = self._loads.get(slot)
        if load is None:
            load = self._loads[slot] = _Load(slot)
        return load


def _weight(tokens: int) -> int:
    """An empty message still is one."""
    return max(1, integer("tokens", tokens, at_least=0))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _ranks(key: str, seeds: Sequence[int]) -> list[int]:
    """A number for each slot, drawn by the key; the lowest comes first."""
    return list(map(xxhash.xxh3_64_intdigest, repeat(_encoded(key)), seeds))


def _ordered(ranks: Sequence[int]) -> list[int]:
    """Indices by rank; equal ones keep the order of their slots' names."""
    return sorted(range(len(ranks)), key=ranks.__getitem__)
