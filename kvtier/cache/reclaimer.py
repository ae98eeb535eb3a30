"""Makes room: gives slots of a pool, evicting pages when none are free.

A page that leaves the device is copied to host memory first, and one that leaves host memory is offered to Redis first.
What Redis does not take is dropped, and so are pages that find all of host memory held by transfers, or that the GPU
fails to copy. All are counted.
"""

from __future__ import annotations

import asyncio

import numpy as np

from kvtier.errors import CacheFullError, GpuError
from kvtier.index import NO_SLOT, PageIndex, PageRun
from kvtier.index.pool import NO_SLOTS, SlotArray
from kvtier.index.radix import BoolArray, Cursor
from kvtier.metrics import Metrics
from kvtier.tiers.base import Tier
from kvtier.tiers.mover import Mover, until_all_ended

_HOST_BATCH = 16  # pages evicted from host memory at once: their writes to Redis overlap


class Reclaimer:
    """Allocates slots of both pools. Allocations of a pool take their turn, so what one frees no other takes.

    NOTE: An allocation of device slots may wait for host slots; nothing waits the other way round.
    """

    def __init__(self, index: PageIndex, mover: Mover, metrics: Metrics) -> None:
        self._index = index
        self._mover = mover
        self._metrics = metrics
        self._device_turn = asyncio.Lock()
        self.host_turn = asyncio.Lock()

    async def allocate_device(self, count: int) -> SlotArray:
        """`count` device slots; raises `CacheFullError` when leases hold too many of the others."""
        pool = self._index.device
        async with self._device_turn:
            while pool.num_free < count:
                available = self.num_device_available
                if count > available or not await self._evict_from_device(count - pool.num_free):
                    raise CacheFullError(
                        f"{count} pages asked, but leases, pins and transfers hold {pool.num_slots - available} of the "
                        f"{pool.num_slots} on the device; release leases, ask for fewer pages, or give the daemon more "
                        "--device-bytes"
                    )
            return pool.allocate(count)

    @property
    def num_device_available(self) -> int:
        """Device slots that nothing holds: free, or of pages that can be evicted."""
        return self._index.device.num_slots - self._index.device.num_held - self._index.leases.num_owned

    async def allocate_host(self, count: int) -> SlotArray:
        """Up to `count` host slots; fewer when the others are held."""
        pool = self._index.host
        async with self.host_turn:
            while pool.num_free < min(count, pool.num_slots):
                if not await self._evict_from_host(count - pool.num_free):
                    break
            return pool.allocate(min(count, pool.num_free))

    async def _evict_from_device(self, count: int) -> int:
        # A batch keeps its copies in host memory while the next pages need room there: half of a small host pool.
        runs = self._index.take_device_victims(min(count, max(1, self._index.host.num_slots // 2)))
        # NOTE: Host copies are held until their pages have left the device: as copies of pages that are on the device,
        # and the least recently used ones at that, they would be the first to make room for the next copy.
        copies = [run.host[run.host != NO_SLOT] for run in runs]
        for slots in copies:
            self._index.host.hold(slots)
        try:
            try:
                for run in runs:
                    for stretch in stretches(run, run.host == NO_SLOT):
                        copies.append(await self.copy_to_host(stretch))
            finally:
                for run in runs:
                    self._index.device.release(run.device)
            num_known = self._index.tree.num_pages
            freed = sum(map(self._index.drop_device, runs))
        finally:
            for slots in copies:
                self._index.host.release(slots)
        dropped = num_known - self._index.tree.num_pages  # host memory had no room for them, or the copy failed
        self._metrics.evictions.labels(Tier.DEVICE, "dropped").inc(dropped)
        self._metrics.evictions.labels(Tier.DEVICE, "spilled").inc(freed - dropped)
        return freed

    async def copy_to_host(self, run: PageRun) -> SlotArray:
        """Copies the last pages of a run, as many as find room, to host memory; returns their host slots, held.

        None when the copy fails. The caller holds the run's device slots.
        """
        slots = await self.allocate_host(run.num_pages)
        copied = part_of(run, run.num_pages - slots.size, run.num_pages)
        try:
            await self._mover.spill(copied.device, slots)
        except GpuError:
            self._index.host.free(slots)
            return NO_SLOTS
        self._index.host.free(self._index.set_host(copied, slots))
        copies = self._index.run(copied.cursor, copied.first_page).host
        self._index.host.hold(copies)
        return copies

    async def _evict_from_host(self, count: int) -> int:
        freed = self._index.drop_mirrors(count)
        self._metrics.evictions.labels(Tier.HOST, "copied").inc(freed)
        if freed >= count:
            return freed
        runs = self._index.take_host_victims(max(count - freed, min(_HOST_BATCH, self._index.host.num_slots // 4)))
        try:
            await until_all_ended([self._offer(run) for run in runs])
        finally:
            for run in runs:
                self._index.host.release(run.host)
        for run in runs:
            stored = self._index.run(run.cursor, run.first_page).stored
            went = self._index.drop_host(run)
            in_redis = int(np.count_nonzero(stored[stored.size - went :]))
            self._metrics.evictions.labels(Tier.HOST, "spilled").inc(in_redis)
            self._metrics.evictions.labels(Tier.HOST, "dropped").inc(went - in_redis)
            freed += went
        return freed

    async def _offer(self, run: PageRun) -> None:
        await self.store(await self.recheck(run))

    async def recheck(self, run: PageRun) -> PageRun:
        """A run as Redis has it now, which drops pages of its own: at their TTL, for lack of memory, in a restart.

        The caller holds the run's slots.
        """
        if not run.stored.any():
            return run
        keys = [key for key, is_stored in zip(run.keys, run.stored, strict=True) if is_stored]
        stored = run.stored.copy()
        stored[run.stored] = await self._mover.still_stored(run.namespace, keys)
        self._index.set_stored(run, stored)
        return run._replace(stored=stored)

    async def store(self, run: PageRun) -> None:
        """Writes those pages of a run to Redis that it does not have.

        The caller holds the run's host slots.
        """
        wanted = np.flatnonzero(~run.stored)
        if not wanted.size:
            return
        keys = [run.keys[index] for index in wanted]
        arrived = await self._mover.store(run.namespace, keys, run.host[wanted])
        stored = run.stored.copy()
        stored[wanted] = arrived
        self._index.set_stored(run, stored)


def stretches(run: PageRun, marked: BoolArray) -> list[PageRun]:
    """The stretches of consecutive pages of a run that are marked."""
    edges = np.flatnonzero(np.diff(marked, prepend=False, append=False))
    return [part_of(run, int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def part_of(run: PageRun, start: int, stop: int) -> PageRun:
    """Pages `start` to `stop` of a run."""
    return PageRun(
        Cursor(run.cursor.node, run.first_page + stop),
        run.first_page + start,
        run.device[start:stop],
        run.host[start:stop],
        run.keys[start:stop],
        run.stored[start:stop],
    )
