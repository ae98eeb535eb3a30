"""What moves pages between the tiers: take slots, copy, publish or drop, with anything else in between."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from plain_model import Path
from simulated_index import NUM_HOST, SimulatedIndex
from simulated_pool import Hold, SimulatedPool

from kvtier.index import NO_SLOT, Cursor, PageRun
from kvtier.index.pool import SlotArray

MAX_IN_FLIGHT = 4  # more would only fill the pools

picks = st.integers(0, 999)
counts = st.integers(1, 12)
one_in_ten = st.integers(0, 9).map(lambda number: number == 9)


@dataclass(eq=False)
class CopyDown:
    """Pages on their way to host memory and, if it is a spill, off the device."""

    run: PageRun
    source: Hold
    copies: list[Hold]  # host slots of these pages; held, or they might go before the pages leave the device
    target: SlotArray  # host slots for the first pages of the run
    is_spill: bool
    is_copied: bool = False


@dataclass(eq=False)
class LeaveHost:
    """Pages on their way from host memory to Redis."""

    run: PageRun
    source: Hold


@dataclass(eq=False)
class MoveUp:
    """Pages on their way to the device, or from Redis to host memory, behind pages that are held."""

    start: Cursor
    before: Path
    paths: list[Path]
    device_held: Hold
    host_held: Hold  # for the device: where the pages come from
    target: SlotArray
    to_device: bool


class TransferRules(SimulatedIndex):
    """Rules over spills, write-through, host eviction, promotion and fetches."""

    def __init__(self) -> None:
        super().__init__()
        self.in_flight: list[CopyDown | LeaveHost | MoveUp] = []

    def _may_start(self) -> bool:
        return len(self.in_flight) < MAX_IN_FLIGHT

    @precondition(lambda self: self.in_flight)
    @rule(pick=picks, fails=one_in_ten)
    def go_on(self, pick: int, fails: bool) -> None:
        transfer = self.in_flight.pop(pick % len(self.in_flight))
        match transfer:
            case CopyDown(is_copied=False) if not fails:
                self._publish_copies(transfer)
                self.in_flight.append(transfer)
            case CopyDown():
                self._end_copy(transfer)
            case LeaveHost():
                self._end_host_eviction(transfer, fails)
            case MoveUp():
                self._end_move_up(transfer, fails)

    # --- making room at once, as an allocation does ------------------------------------------------------------------

    def allocate_device(self, count: int) -> SlotArray:
        """Up to `count` slots in transit; spills pages when too few are free."""
        while self.index.device.num_free < count:
            spills = self._take_spills(count - self.index.device.num_free, num_copies=count)
            for spill in spills:
                self._publish_copies(spill)
            if not sum([self._end_copy(spill) for spill in spills]):
                break
        return self.device.allocate(count)

    def _allocate_host(self, count: int) -> SlotArray:
        """Up to `count` slots in transit; drops mirrors, then evicts pages when too few are free."""
        if (lacking := count - self.index.host.num_free) > 0:
            lacking -= self._drop_mirrors(lacking)
        if lacking > 0:
            for transfer in self._take_host_evictions(lacking):
                self._end_host_eviction(transfer, fails=False)
        return self.host.allocate(count)

    # --- device to host ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.device_ends() and self._may_start())
    @rule(count=counts, num_copies=st.sampled_from([12, 12, 12, 3, 1, 0]))
    def start_spill(self, count: int, num_copies: int) -> None:
        self.in_flight += self._take_spills(count, num_copies)

    def _take_spills(self, count: int, num_copies: int) -> list[CopyDown]:
        ends = [path for path in self.model.device_ends() if not self.device.holds[path]]
        runs = self.index.take_device_victims(count)
        sources = self._check_victims(runs, [run.device for run in runs], self.device, ends, count)
        copies = [self._hold_copies(run, source) for run, source in zip(runs, sources, strict=True)]
        return [
            CopyDown(run, source, [copy], self._allocate_host(min(num_copies, run.num_pages)), is_spill=True)
            for run, source, copy in zip(runs, sources, copies, strict=True)
        ]

    def _hold_copies(self, run: PageRun, source: Hold) -> Hold:
        there = run.host != NO_SLOT
        return self.host.hold(run.host[there], [path for path in source.paths if self.model.pages[path].on_host])

    @precondition(lambda self: self.model.device_ends() and self._may_start())
    @rule(pick=picks, first=st.integers(0, 6))
    def start_write_through(self, pick: int, first: int) -> None:
        ends = self.model.device_ends()
        end = ends[pick % len(ends)]
        match, paths, num_device = self.match(self.root(end[0]), end[:1], end)
        run = self.index.run(match.end, min(first, num_device - 1))
        source = self.device.hold(run.device, paths[run.first_page :])
        assert self.paths_of(run, self.device, run.device) == source.paths
        copies = self._hold_copies(run, source)
        self.in_flight.append(CopyDown(run, source, [copies], self._allocate_host(run.num_pages), is_spill=False))

    def _publish_copies(self, transfer: CopyDown) -> None:
        run, target = transfer.run, transfer.target
        paths = transfer.source.paths[: target.size]
        self.host.write(target, self.device.read(transfer.source.slots[: target.size]))
        unused = self.index.set_host(run, target)
        taken = [self.model.arrive_on_host(path) for path in paths]
        assert unused.tolist() == [slot for slot, is_taken in zip(target.tolist(), taken, strict=True) if not is_taken]
        self.host.arrive(target, unused)
        copies = self.index.run(run.cursor, run.first_page).host[: target.size]
        transfer.copies.append(self.host.hold(copies, paths))
        transfer.is_copied = True

    def _end_copy(self, transfer: CopyDown) -> int:
        num_gone = 0
        self.device.release(transfer.source)
        if not transfer.is_copied:
            self.host.arrive(transfer.target, transfer.target)
        elif transfer.is_spill:
            num_gone = self.index.drop_device(transfer.run)
            assert num_gone == self.model.drop_device(transfer.source.paths)
        for copy in transfer.copies:
            self.host.release(copy)
        return num_gone

    # --- out of host memory ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.host_ends() and self._may_start())
    @rule(count=counts)
    def start_host_eviction(self, count: int) -> None:
        self.in_flight += self._take_host_evictions(count)

    def _take_host_evictions(self, count: int) -> list[LeaveHost]:
        ends = [path for path in self.model.host_ends() if not self.host.holds[path]]
        runs = self.index.take_host_victims(count)
        sources = self._check_victims(runs, [run.host for run in runs], self.host, ends, count)
        return [LeaveHost(run, source) for run, source in zip(runs, sources, strict=True)]

    def _end_host_eviction(self, transfer: LeaveHost, fails: bool) -> None:
        paths = transfer.source.paths
        if not fails:
            self.index.set_stored(transfer.run, np.ones(len(paths), dtype=np.bool_))
            self.model.arrive_in_redis(paths)
        self.host.release(transfer.source)
        assert self.index.drop_host(transfer.run) == self.model.drop_host(paths)

    @precondition(lambda self: self.model.mirrors())
    @rule(count=counts)
    def drop_mirrors(self, count: int) -> None:
        self._drop_mirrors(count)

    def _drop_mirrors(self, count: int) -> int:
        mirrors = self.model.mirrors()
        freed = self.index.drop_mirrors(count)
        assert freed == min(count, len(mirrors))
        host = {path: slot for path, _, slot in self.columns()}
        gone = [path for path in mirrors if host[path] == NO_SLOT]
        assert len(gone) == freed
        for path in gone:
            self.model.pages[path].on_host = False
        newest = max((self.model.pages[path].last_access for path in gone), default=0)
        assert all(self.model.pages[path].last_access >= newest for path in self.model.mirrors())
        return freed

    def _check_victims(
        self, runs: list[PageRun], slots: list[SlotArray], pages: SimulatedPool, ends: list[Path], count: int
    ) -> list[Hold]:
        """Checks that the runs end at the least recently used of `ends`, at all of them unless `count` was reached."""
        paths = [self.paths_of(run, pages, taken) for run, taken in zip(runs, slots, strict=True)]
        ends.sort(key=lambda path: self.model.pages[path].last_access)
        assert [run_paths[-1] for run_paths in paths] == ends[: len(runs)]
        assert not any(pages.holds[path] for run_paths in paths for path in run_paths), "a held page was taken"
        num_taken = sum(run.num_pages for run in runs)
        assert num_taken == count or (num_taken < count and len(runs) == len(ends))
        return [pages.note_hold(taken, run_paths) for taken, run_paths in zip(slots, paths, strict=True)]

    # --- up ----------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.host_ends() and self._may_start())
    @rule(pick=picks, at_most=counts)
    def start_promotion(self, pick: int, at_most: int) -> None:
        ends = self.model.host_ends()
        self.in_flight.append(self._take_promotion(ends[pick % len(ends)], at_most))

    @precondition(lambda self: self.model.redis - self.model.pages.keys() and self._may_start())
    @rule(pick=picks, at_most=counts)
    def start_fetch(self, pick: int, at_most: int) -> None:
        lacking = sorted(self.model.redis - self.model.pages.keys())
        self.in_flight.append(self._take_fetch(lacking[pick % len(lacking)], at_most))

    def bring_up(self, wanted: Path) -> None:
        """Fetches and promotes at once what is known of a path."""
        self._end_move_up(self._take_fetch(wanted, NUM_HOST), fails=False)
        self._end_move_up(self._take_promotion(wanted, NUM_HOST), fails=False)

    def _take_promotion(self, wanted: Path, at_most: int) -> MoveUp:
        match, known, num_device = self.match(self.root(wanted[0]), wanted[:1], wanted)
        device_held = self.device.hold(match.device_slots()[:num_device], known[:num_device])
        host_held = self.host.hold(match.host_slots()[num_device:], known[num_device:])
        target = self.allocate_device(min(at_most, len(host_held.paths)))
        start, before = Cursor(match.end.node, num_device), (wanted[:1], *known)[num_device]
        return MoveUp(start, before, host_held.paths[: target.size], device_held, host_held, target, to_device=True)

    def _take_fetch(self, wanted: Path, at_most: int) -> MoveUp:
        match, known, num_device = self.match(self.root(wanted[0]), wanted[:1], wanted)
        device_held = self.device.hold(match.device_slots()[:num_device], known[:num_device])
        host_held = self.host.hold(match.host_slots()[num_device:], known[num_device:])
        before = (wanted[:1], *known)[-1]
        arriving = self.model.stored_behind(before, wanted)
        target = self._allocate_host(min(at_most, len(arriving)))
        return MoveUp(match.end, before, arriving[: target.size], device_held, host_held, target, to_device=False)

    def _end_move_up(self, transfer: MoveUp, fails: bool) -> None:
        target_pool = self.device if transfer.to_device else self.host
        if fails or not transfer.paths:
            target_pool.arrive(transfer.target, transfer.target)
        elif transfer.to_device:
            self._publish_on_device(transfer)
        else:
            self._publish_on_host(transfer)
        self.device.release(transfer.device_held)
        self.host.release(transfer.host_held)

    def _publish_on_device(self, transfer: MoveUp) -> None:
        target = transfer.target
        self.device.write(target, self.host.read(transfer.host_held.slots[: target.size]))
        pages = self.whole(transfer.before, transfer.paths[-1])
        published = self.index.publish(transfer.start, *pages, device=target)
        assert published.taken.tolist() == [self.model.arrive_on_device(path) for path in transfer.paths]
        self.device.arrive(target, target[~published.taken])

    def _publish_on_host(self, transfer: MoveUp) -> None:
        target = transfer.target
        self.host.write(target, transfer.paths)
        pages = self.whole(transfer.before, transfer.paths[-1])
        published = self.index.publish(transfer.start, *pages, host=target, stored=True)
        assert published.taken.tolist() == [self.model.arrive_on_host(path) for path in transfer.paths]
        self.model.arrive_in_redis(transfer.paths)
        self.host.arrive(target, target[~published.taken])
        self.index.touch(published.end)
        self.model.touch(transfer.paths[-1])
