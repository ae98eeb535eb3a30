"""A slot pool whose slots contain the path of the page that was last copied into them."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from plain_model import Path

from kvtier.index import SlotPool
from kvtier.index.pool import SlotArray, slot_array


class Hold(NamedTuple):
    """Slots that a transfer holds, and the pages that they contain."""

    slots: SlotArray
    paths: list[Path]


class SimulatedPool:
    """One of the index's pools, the contents of its slots, and the model's count of holds by page."""

    def __init__(self, pool: SlotPool, holds: Counter[Path]) -> None:
        self.pool = pool
        self.holds = holds
        self.contents: list[Path | None] = [None] * pool.num_slots
        self._in_transit: set[int] = set()

    @property
    def in_transit(self) -> SlotArray:
        """Slots that are allocated and not in the tree yet."""
        return slot_array(sorted(self._in_transit))

    def allocate(self, count: int) -> SlotArray:
        """Up to `count` slots, now in transit."""
        slots = self.pool.allocate(min(count, self.pool.num_free))
        self._in_transit.update(slots.tolist())
        return slots

    def leave_transit(self, slots: SlotArray) -> None:
        """Slots have an owner now that the index knows."""
        self._in_transit.difference_update(slots.tolist())

    def arrive(self, offered: SlotArray, unused: SlotArray) -> None:
        """Ends the transit of slots; the index did not take those that are `unused`."""
        self.leave_transit(offered)
        self.pool.free(unused)

    def hold(self, slots: SlotArray, paths: list[Path]) -> Hold:
        """Holds the slots of pages for a transfer."""
        self.pool.hold(slots)
        return self.note_hold(slots, paths)

    def note_hold(self, slots: SlotArray, paths: list[Path]) -> Hold:
        """Tells the model about holds that the index has made itself."""
        self.holds.update(paths)
        return Hold(slots, paths)

    def release(self, hold: Hold) -> None:
        """Checks that the pages are still where they were, and ends the hold."""
        assert self.read(hold.slots) == hold.paths, "a held slot was written"
        self.pool.release(hold.slots)
        self.holds.subtract(hold.paths)

    def write(self, slots: SlotArray, paths: list[Path]) -> None:
        """Copies pages into slots."""
        for slot, path in zip(slots.tolist(), paths, strict=True):
            self.contents[slot] = path

    def read(self, slots: SlotArray) -> list[Path | None]:
        """What slots contain."""
        return [self.contents[slot] for slot in slots]
