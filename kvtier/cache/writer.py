"""Write policies: when committed pages get a copy below the device.

`write_back` copies on eviction only; `write_through` as soon as a page is committed; `write_through_selective` once a
page has been asked for again often enough. Durability is tracked page by page, so whatever a full queue or a dead Redis
leaves out is written on eviction after all.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from enum import StrEnum

import numpy as np

from kvtier.cache.reclaimer import Reclaimer, part_of, stretches
from kvtier.index import NO_SLOT, Cursor, PageIndex, PageRun
from kvtier.index.node import Node
from kvtier.metrics import Metrics

_BATCH_PAGES = 32
_MAX_QUEUED_SHARE = 2  # of the device pool at most half waits to be written, and is held meanwhile


class WritePolicy(StrEnum):
    """When pages are written below the device."""

    WRITE_BACK = "write_back"
    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"


class Writer:
    """Writes pages of one cache through to host memory and Redis, in the background."""

    def __init__(
        self,
        policy: WritePolicy,
        after_hits: int,
        index: PageIndex,
        reclaimer: Reclaimer,
        metrics: Metrics,
        has_redis: bool,
    ) -> None:
        self._policy = policy
        self._after_hits = after_hits
        self._index = index
        self._reclaimer = reclaimer
        self._metrics = metrics
        self._has_redis = has_redis
        self._queue: deque[PageRun] = deque()
        self._waiting: set[bytes] = set()  # chain keys of the pages in the queue and of the batch being written
        self._work = asyncio.Event()
        self._is_closed = False
        self.turn = asyncio.Lock()  # held while a batch is being written

    def committed(self, end: Cursor, first_page: int) -> None:
        """Tells that the pages from `first_page` to `end` are new."""
        if self._policy is WritePolicy.WRITE_THROUGH:
            self._enqueue(self._index.run(end, first_page))

    def used(self, end: Cursor) -> None:
        """Tells that the pages up to `end` were found by a prompt."""
        if self._policy is WritePolicy.WRITE_BACK:
            return
        # The commit was the first hit. What write_through had to skip is written with the next one.
        after_hits = self._after_hits if self._policy is WritePolicy.WRITE_THROUGH_SELECTIVE else 1
        for node, start, stop in self._index.tree.path(end):
            unwritten = ~node.stored[start:stop] if self._has_redis else node.host[start:stop] == NO_SLOT
            if node.hits > after_hits and unwritten.any():
                self._enqueue(self._index.run(Cursor(node, node.first_page + stop), node.first_page + start))

    def _enqueue(self, run: PageRun) -> None:
        written = run.stored if self._has_redis else run.host != NO_SLOT
        waiting = np.array([key in self._waiting for key in run.keys], dtype=np.bool_)
        for stretch in stretches(run, ~(written | waiting)):
            room = max(1, self._index.device.num_slots // _MAX_QUEUED_SHARE) - len(self._waiting)
            taken = part_of(stretch, 0, min(stretch.num_pages, room))
            self._metrics.writes_skipped.inc(stretch.num_pages - taken.num_pages)
            if taken.num_pages:
                self._index.device.hold(taken.device)
                self._waiting.update(taken.keys)
                self._queue.append(taken)
                self._work.set()

    def _dequeue(self, run: PageRun) -> None:
        self._index.device.release(run.device)
        self._waiting.difference_update(run.keys)

    def forget(self, namespace: str) -> None:
        """Leaves the pages of a namespace that wait in the queue unwritten."""
        dropped = [run for run in self._queue if run.namespace == namespace]
        self._queue = deque(run for run in self._queue if run.namespace != namespace)
        for run in dropped:
            self._dequeue(run)

    async def run(self) -> None:
        """Writes what is queued, for ever."""
        while True:
            await self._work.wait()
            async with self.turn:
                if self._queue:
                    await self._write_next()
                else:
                    self._work.clear()

    async def _write_next(self) -> None:
        run = self._queue.popleft()
        batch = part_of(run, 0, min(_BATCH_PAGES, run.num_pages))
        if run.num_pages > batch.num_pages:
            self._queue.appendleft(part_of(run, batch.num_pages, run.num_pages))
        try:
            await self._write(batch)
        finally:
            self._dequeue(batch)

    async def _write(self, run: PageRun) -> None:
        """Writes a run, whose device slots are held, to host memory and Redis."""
        copies = await self._reclaimer.copy_to_host(run)
        try:
            if self._has_redis:
                await self._reclaimer.store(self._index.run(run.cursor, run.cursor.depth - copies.size))
        finally:
            self._index.host.release(copies)

    async def write_all(self, node: Node, deadline: float, *, recheck: bool) -> int:
        """Writes those pages of a node to Redis that it lacks, wherever they are; returns how many.

        With `recheck` Redis is asked about the pages that it was given before, too. Begins no batch after `deadline`
        (seconds of the monotonic clock).
        """
        num_written, page = 0, node.first_page
        while page < node.end_page and time.monotonic() < deadline:
            async with self.turn:
                if self._is_closed or time.monotonic() >= deadline:
                    break
                # NOTE: Looked up in its turn: a flush may have had the one before, and left nothing to write.
                page = max(page, node.first_page)
                end = max(page, min(page + _BATCH_PAGES, node.end_page))
                batch = self._index.run(Cursor(node, end), page)
                if recheck or not batch.stored.all():
                    num_written += await self._write_wherever(batch, recheck)
            page += _BATCH_PAGES
        return num_written

    async def _write_wherever(self, run: PageRun, recheck: bool) -> int:
        num_device = int(np.count_nonzero(run.device != NO_SLOT))
        device_slots, host_slots = run.device[:num_device], run.host[num_device:]
        self._index.device.hold(device_slots)
        self._index.host.hold(host_slots)
        try:
            if recheck:
                run = await self._reclaimer.recheck(run)
            on_device, on_host = part_of(run, 0, num_device), part_of(run, num_device, run.num_pages)
            if not on_device.stored.all():
                await self._write(on_device)
            await self._reclaimer.store(on_host)
            stored = self._index.run(run.cursor, run.first_page).stored
            return int(np.count_nonzero(stored & ~run.stored))
        finally:
            self._index.device.release(device_slots)
            self._index.host.release(host_slots)

    async def close(self) -> None:
        """Returns when the batch under way is written; none is begun after that."""
        async with self.turn:
            self._is_closed = True
