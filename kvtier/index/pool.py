"""Which slots of a pool are free, and which are held.

A slot is a place for one page image. It is free, or allocated with a number of holds: leases, pins and transfers hold
slots, and only an allocated slot without holds may be freed. Who owns an allocated slot (the tree, a lease that
reserved it) is not known here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SlotArray = npt.NDArray[np.int32]

NO_SLOT = -1
NO_SLOTS: SlotArray = np.empty(0, dtype=np.int32)
_FREE = -1


def slot_array(slots: object) -> SlotArray:
    """`slots` as a one-dimensional int32 array."""
    return np.asarray(slots, dtype=np.int32).reshape(-1)


class SlotPool:
    """Free list and hold counts of `num_slots` slots; every operation takes an array of distinct slots."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        # The free list is a stack in an array: the slot freed last is the first to be used again.
        self._stack = np.arange(num_slots - 1, -1, -1, dtype=np.int32)
        self.num_free = num_slots
        # NOTE: The entry behind the last slot is `NO_SLOT`'s: always free, so it is refused like a free slot.
        self._holds = np.full(num_slots + 1, _FREE, dtype=np.int32)

    def grow(self, num_slots: int) -> None:
        """Adds free slots behind the last one, until there are `num_slots`."""
        num_added = num_slots - self.num_slots
        if num_added > 0:
            stack = np.empty(num_slots, dtype=np.int32)
            stack[: self.num_free] = self._stack[: self.num_free]
            stack[self.num_free : self.num_free + num_added] = np.arange(num_slots - 1, self.num_slots - 1, -1)
            self._stack = stack
            self._holds = np.append(self._holds, np.full(num_added, _FREE, dtype=np.int32))
            self.num_free += num_added
            self.num_slots = num_slots

    @property
    def num_held(self) -> int:
        """Allocated slots that something holds."""
        return int(np.count_nonzero(self._holds > 0))

    def allocate(self, count: int) -> SlotArray:
        """`count` free slots, now allocated without holds. The caller has checked `num_free`."""
        if not 0 <= count <= self.num_free:
            raise ValueError(f"{count} slots asked, {self.num_free} free")
        first = self.num_free - count
        slots = self._stack[first : self.num_free][::-1].copy()
        self.num_free = first
        self._holds[slots] = 0
        return slots

    def free(self, slots: SlotArray) -> None:
        """Gives allocated slots without holds back."""
        refused = self._holds[slots] != 0
        if refused.any():
            raise ValueError(f"slots {slots[refused][:8].tolist()} are free already, or held")
        self._holds[slots] = _FREE
        self._stack[self.num_free : self.num_free + slots.size] = slots
        self.num_free += slots.size

    def hold(self, slots: SlotArray) -> None:
        """Adds one hold to each allocated slot."""
        holds = self._holds[slots]
        if (holds == _FREE).any():
            raise ValueError(f"slots {slots[holds == _FREE][:8].tolist()} are free and cannot be held")
        self._holds[slots] = holds + 1

    def release(self, slots: SlotArray) -> None:
        """Takes one hold from each slot."""
        holds = self._holds[slots]
        if (holds <= 0).any():
            raise ValueError(f"slots {slots[holds <= 0][:8].tolist()} have no hold to release")
        self._holds[slots] = holds - 1

    def is_held(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        """For each slot, whether something holds it."""
        held: npt.NDArray[np.bool_] = self._holds[slots] > 0
        return held

    def allocated(self) -> SlotArray:
        """All slots that are not free."""
        return np.flatnonzero(self._holds != _FREE).astype(np.int32)

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless the free list and the counts agree."""
        stack = self._stack[: self.num_free]
        assert np.unique(stack).size == self.num_free, "a slot is on the free list twice"
        assert (self._holds[stack] == _FREE).all(), "a slot on the free list is allocated"
        assert self.allocated().size == self.num_slots - self.num_free, "a free slot is not on the free list"

    def check_owners(self, owned: list[SlotArray]) -> None:
        """Raises `AssertionError` unless `owned`, which may contain `NO_SLOT`, names each allocated slot once."""
        slots = np.concatenate(owned)
        slots = slots[slots != NO_SLOT]
        assert np.unique(slots).size == slots.size, "a slot has two owners"
        assert np.array_equal(np.sort(slots), self.allocated()), "a slot has no owner, or is free and owned"
