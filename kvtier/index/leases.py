"""Leases: which session holds which device slots.

A lease holds tree pages, which it may read, and owns reserved pages, which it may write until it commits them. A pin is
a lease without a session that runs out at a set time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvtier.errors import InvalidRequestError, LeaseUnknownError
from kvtier.index.pool import SlotArray, SlotPool, slot_array
from kvtier.index.radix import Cursor

PIN_SESSION = 0


@dataclass(eq=False)
class Lease:
    """A session's claim on one sequence. Changed by `LeaseTable` and `PageIndex` only.

    Args:
        end: the position in the tree behind the matched and committed pages.
        held: tree pages of the sequence; one hold each.
        reserved: the lease's own pages, writable by the worker.
        duplicates: committed pages whose tokens the tree had already; the worker may go on reading its own copy.
        expires_at: for pins, seconds of the daemon's monotonic clock.
    """

    lease_id: int
    session_id: int
    namespace: str
    end: Cursor
    held: list[SlotArray] = field(default_factory=list)
    reserved: set[int] = field(default_factory=set)
    duplicates: list[int] = field(default_factory=list)
    expires_at: float | None = None
    released: bool = False

    def check_reserved(self, pages: SlotArray) -> None:
        """Raises `InvalidRequestError` unless `pages` are distinct reserved pages of this lease."""
        distinct = set(pages.tolist())
        if len(distinct) != pages.size:
            raise InvalidRequestError("pages names a page twice; a page can be committed once")
        if foreign := sorted(distinct - self.reserved)[:8]:
            raise InvalidRequestError(
                f"pages {foreign} are not reserved by lease {self.lease_id}; "
                "commit each page once, and only pages that Acquire or Extend gave you"
            )


class Quarantine(NamedTuple):
    """Pages of a lost session that a stray kernel may still write."""

    free_at: float
    slots: SlotArray


class LeaseTable:
    """All leases on the slots of one device pool."""

    def __init__(self, slots: SlotPool) -> None:
        self._slots = slots
        self._leases: dict[int, Lease] = {}
        self._quarantine: list[Quarantine] = []
        self._last_id = 0

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def __len__(self) -> int:
        return len(self._leases)

    def open(self, session_id: int, namespace: str, end: Cursor, held: list[SlotArray]) -> Lease:
        """A new lease that holds the given tree pages."""
        for slots in held:
            self._slots.hold(slots)
        self._last_id += 1
        lease = Lease(self._last_id, session_id, namespace, end, list(held))
        self._leases[lease.lease_id] = lease
        return lease

    def get(self, lease_id: int, session_id: int) -> Lease:
        """Raises `LeaseUnknownError` unless this session has this lease."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.session_id != session_id:
            raise LeaseUnknownError(f"lease {lease_id} is not one of this session's; it was released or never acquired")
        return lease

    def hold(self, lease: Lease, slots: SlotArray) -> None:
        """Adds tree pages to a lease."""
        self._slots.hold(slots)
        lease.held.append(slots)

    def release(self, lease: Lease) -> None:
        """Ends a lease: its holds go, its own pages are free at once."""
        own = self._end(lease)
        self._slots.free(own)

    def lose(self, session_id: int, free_at: float) -> int:
        """Ends all leases of a lost session; their own pages are free from `free_at` on. Returns how many ended."""
        lost = [lease for lease in self if lease.session_id == session_id]
        for lease in lost:
            own = self._end(lease)
            if own.size:
                self._quarantine.append(Quarantine(free_at, own))
        return len(lost)

    def sweep(self, now: float) -> None:
        """Frees quarantined pages whose time has come, and ends pins that have run out."""
        for quarantined in [q for q in self._quarantine if q.free_at <= now]:
            self._slots.free(quarantined.slots)
        self._quarantine = [q for q in self._quarantine if q.free_at > now]
        for lease in [pin for pin in self if pin.expires_at is not None and pin.expires_at <= now]:
            self.release(lease)

    def _end(self, lease: Lease) -> SlotArray:
        del self._leases[lease.lease_id]
        lease.released = True
        for slots in lease.held:
            self._slots.release(slots)
        return slot_array([*lease.reserved, *lease.duplicates])

    @property
    def num_owned(self) -> int:
        """Slots that leases or the quarantine own, outside the tree."""
        own = sum(len(lease.reserved) + len(lease.duplicates) for lease in list(self))
        return own + sum(quarantined.slots.size for quarantined in self._quarantine)

    def owned_slots(self) -> SlotArray:
        """These slots."""
        owned = [slot for lease in self for slot in (*lease.reserved, *lease.duplicates)]
        return np.concatenate([slot_array(owned), *(q.slots for q in self._quarantine)])

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless every page of a lease is held."""
        for lease in self:
            for slots in lease.held:
                assert self._slots.is_held(slots).all(), "a leased page is not held"
