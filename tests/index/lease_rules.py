"""What sessions do to the index: acquire, extend, commit, release, get lost; and pins."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from plain_model import PageKind, Path, prefixes
from simulated_index import HeldLease
from transfer_rules import TransferRules, picks

from kvtier.index import Cursor
from kvtier.index.leases import PIN_SESSION
from kvtier.index.pool import slot_array

MAX_LEASES = 5
FLUSH_BEYOND = 22  # pages: small trees are left to grow
GRACE_S = 3.0
ADAPTER = b"digest of an adapter, 32 bytes.."

namespaces = st.sampled_from(["a", "a", "b"])
sessions = st.integers(1, 3)
page_kinds = st.sampled_from([(b"", 0), (b"", 0), (b"", 0), (b"", 1), (ADAPTER, 0)])  # prompts often share a prefix
prompts = st.lists(page_kinds, min_size=2, max_size=8)
turns = st.lists(page_kinds, min_size=1, max_size=3)


class LeaseRules(TransferRules):
    """Rules over leases and pins."""

    @precondition(lambda self: len(self.leases) < MAX_LEASES)
    @rule(session=sessions, namespace=namespaces, prompt=prompts, num_later=st.integers(0, 3))
    def acquire(self, session: int, namespace: str, prompt: list[PageKind], num_later: int) -> None:
        held = self._open(session, self.root(namespace), (namespace,), prompt)
        self._compute(held, prompt, num_later)

    @precondition(lambda self: len(self.leases) < MAX_LEASES and (self.model.redis or self.model.host_ends()))
    @rule(session=sessions, pick=picks)
    def acquire_and_wait(self, session: int, pick: int) -> None:
        below = sorted({*self.model.redis, *self.model.host_ends()})
        namespace, *pages = wanted = below[pick % len(below)]
        held = self._open(session, self.root(namespace), (namespace,), pages)
        self.bring_up(wanted)
        self._hold_prefix(held, pages[len(held.held) :])
        self.index.touch(held.lease.end)
        self.model.touch(held.end)

    @rule(session=sessions, namespace=namespaces, prompt=prompts)
    def acquire_and_release(self, session: int, namespace: str, prompt: list[PageKind]) -> None:
        held = self._open(session, self.root(namespace), (namespace,), prompt)
        self._compute(held, prompt, 0)
        self._release(held)

    @precondition(lambda self: len(self.leases) < MAX_LEASES)
    @rule(namespace=namespaces, prompt=prompts)
    def two_compute_the_same(self, namespace: str, prompt: list[PageKind]) -> None:
        one, two = (self._open(session, self.root(namespace), (namespace,), prompt) for session in (1, 2))
        self._compute(one, prompt, 0)
        self._compute(two, prompt, 0)
        self._release(one)

    @precondition(lambda self: 0 < len(self.leases) < MAX_LEASES)
    @rule(pick=picks, session=sessions, turn=turns, num_later=st.integers(0, 3))
    def acquire_behind_a_lease(self, pick: int, session: int, turn: list[PageKind], num_later: int) -> None:
        parent = self.leases[pick % len(self.leases)]
        held = self._open(session, parent.lease.end, parent.end, turn)
        self._compute(held, turn, num_later)
        for slots in parent.lease.held:
            self.index.leases.hold(held.lease, slots)
        self._hold(held, parent.held)

    @precondition(lambda self: self.leases)
    @rule(pick=picks, turn=turns, num_reserved=st.integers(0, 3), backwards=st.booleans())
    def extend_and_commit(self, pick: int, turn: list[PageKind], num_reserved: int, backwards: bool) -> None:
        held = self.leases[pick % len(self.leases)]
        self._reserve(held, num_reserved)
        self._commit(held, turn, backwards)

    @precondition(lambda self: self.leases)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        self._release(self.leases[pick % len(self.leases)])

    @precondition(lambda self: len(self.leases) > 1)
    @rule(session=sessions)
    def lose_session(self, session: int) -> None:
        lost = [held for held in self.leases if held.lease.session_id == session]
        for held in lost:
            self.quarantined.append((self.now + GRACE_S, len(held.lease.reserved) + len(held.lease.duplicates)))
            self._ended(held)
        assert self.index.leases.lose(session, self.now + GRACE_S) == len(lost)

    @precondition(lambda self: self.model.device_ends() and len(self.leases) < MAX_LEASES)
    @rule(pick=picks, lasts_s=st.integers(1, 4))
    def pin(self, pick: int, lasts_s: int) -> None:
        ends = self.model.device_ends()
        namespace, *pages = ends[pick % len(ends)]
        self._open(PIN_SESSION, self.root(namespace), (namespace,), pages).lease.expires_at = self.now + lasts_s

    @precondition(lambda self: self.quarantined or any(held.lease.expires_at for held in self.leases))
    @rule(passed_s=st.integers(1, 3))
    def sweep(self, passed_s: int) -> None:
        self.now += passed_s
        self.index.leases.sweep(self.now)
        self.quarantined = [(free_at, count) for free_at, count in self.quarantined if free_at > self.now]
        for held in [pin for pin in self.leases if pin.lease.expires_at and pin.lease.expires_at <= self.now]:
            self._ended(held)

    @precondition(lambda self: self.leases)
    @rule(pick=picks, turn=turns)
    def hold_what_has_arrived(self, pick: int, turn: list[PageKind]) -> None:
        self._hold_prefix(self.leases[pick % len(self.leases)], turn)

    @precondition(lambda self: len(self.model.pages) > FLUSH_BEYOND)
    @rule(namespace=namespaces)
    def remove_namespace(self, namespace: str) -> None:
        assert self.index.remove_namespace(namespace) == self.model.remove_namespace(namespace)

    # --- the parts of a turn -----------------------------------------------------------------------------------------

    def _open(self, session: int, start: Cursor, before: Path, pages: list[PageKind]) -> HeldLease:
        """A lease on those of `pages` behind `before` that are on the device."""
        held = HeldLease(self.index.leases.open(session, before[0], start, []), before, [])
        self.leases.append(held)
        self._hold_prefix(held, pages)
        self.index.touch(held.lease.end)
        self.model.touch(held.end)
        return held

    def _hold_prefix(self, held: HeldLease, pages: list[PageKind]) -> None:
        """Lets a lease hold those of `pages` behind its end that are on the device."""
        start, before, end = held.lease.end, held.end, (*held.end, *pages)
        found = self.match(start, before, end)
        tokens, _, extras = self.whole(before, end)
        match, num_device = self.index.hold_device_prefix(held.lease, start, tokens, extras)
        assert (match.num_pages, num_device) == (len(found.paths), found.num_device)
        held.end = (before, *found.paths)[num_device]
        self._hold(held, found.paths[:num_device])

    def _compute(self, held: HeldLease, pages: list[PageKind], num_later: int) -> None:
        """Reserves slots for those of `pages` that a new lease lacks, and commits them but the last `num_later`."""
        num_lacking = len(pages) - len(held.held)
        self._reserve(held, num_lacking)
        self._commit(held, pages[len(pages) - num_lacking :][: max(0, num_lacking - num_later)], backwards=False)

    def _reserve(self, held: HeldLease, count: int) -> None:
        slots = self.allocate_device(count)
        self.device.leave_transit(slots)
        held.lease.reserved.update(slots.tolist())

    def _commit(self, held: HeldLease, pages: list[PageKind], backwards: bool) -> None:
        """Commits as many of `pages` as the lease has reserved slots for."""
        lease = held.lease
        reserved = sorted(lease.reserved, reverse=backwards)
        start, end = held.end, (*held.end, *pages[: len(reserved)])
        paths = prefixes(start, end)
        if not paths:
            return
        slots = slot_array(reserved[: len(paths)])
        self.device.write(slots, paths)
        lease.check_reserved(slots)
        duplicates = list(lease.duplicates)
        num_duplicates = self.index.commit(lease, *self.whole(start, end), slots)
        taken = [self.model.arrive_on_device(path) for path in paths]
        duplicates += [slot for slot, is_taken in zip(slots.tolist(), taken, strict=True) if not is_taken]
        assert num_duplicates == taken.count(False) and lease.duplicates == duplicates
        assert lease.reserved == set(reserved[len(paths) :])
        held.end = end
        self._hold(held, paths)
        self.model.touch(end)

    def _hold(self, held: HeldLease, paths: list[Path]) -> None:
        held.held += paths
        self.device.holds.update(paths)

    def _release(self, held: HeldLease) -> None:
        self.index.leases.release(held.lease)
        assert held.lease.released
        self._ended(held)

    def _ended(self, held: HeldLease) -> None:
        self.leases.remove(held)
        self.device.holds.subtract(held.held)
