"""Who holds which slot. A replica that Ray starts anew has a new name there, and takes a name of ours that is free.

    replica A ─ claim ─▶ slot-0         A dies; Ray starts C
    replica B ─ claim ─▶ slot-1         C ─ claim ─▶ slot-0: the keys of slot-0 are its own again

Keys belong to slots, so a restart, an upgrade or an instance that leaves moves no keys but those of its own slot.
"""

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Held", "Slots"]


@dataclass(frozen=True)
class Held:
    """A slot as its holder has announced it."""

    slot: str
    holder: str
    """Ray's name for the replica: another after every restart."""
    address: str
    pid: int


class Slots:
    """The slots of one application: pure bookkeeping. What it forgets in a restart, holders tell again."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}
        self._leaving: set[str] = set()
        """Holders that still answer, and whose slots are free."""

    def claim(self, holder: str, address: str, pid: int, alive: Callable[[str], bool]) -> Held:
        """The free slot with the lowest number is the holder's; one whose holder leaves or is not `alive` is free.

        A holder that asks twice gets its slot again.
        """
        taken = set()
        for slot, held in list(self._held.items()):
            if held.holder == holder or not alive(held.holder):
                self.release(held.holder)
            elif held.holder not in self._leaving:
                taken.add(slot)
        number = 0
        while f"slot-{number}" in taken:
            number += 1
        return self._put(Held(f"slot-{number}", holder, address, pid))

    def announce(self, held: Held) -> bool:
        """A holder says what it holds, from time to time. False if another has its slot: then it holds none."""
        known = self._held.get(held.slot)
        if known is not None and known.holder != held.holder:
            return False
        self._put(held)
        return True

    def leave(self, holder: str) -> None:
        """The holder will go: it still answers, and whoever comes may have its slot."""
        self._leaving.add(holder)

    def release(self, holder: str) -> None:
        """The holder has gone; its slot is free. Nothing happens if it holds none."""
        self._held = {slot: held for slot, held in self._held.items() if held.holder != holder}
        self._leaving.discard(holder)

    def table(self) -> tuple[Held, ...]:
        """All that are held, by slot; those of holders that leave until somebody else has them."""
        return tuple(self._held[slot] for slot in sorted(self._held))

    def _put(self, held: Held) -> Held:
        self._held[held.slot] = held
        return held
