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

from kvtier.cache.reclaimer import Reclaimer, part_of
from kvtier.index import NO_SLOT, Cursor, PageIndex, PageRun
from kvtier.metrics import Metrics

_BATCH_PAGES = 32
_MAX_QUEUED_SHARE = 4  # of the device pool's pages at most a quarter waits to be written, and is held meanwhile


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
        self._num_queued = 0
        self._work = asyncio.Event()
        self.turn = asyncio.Lock()  # held while a batch is being written

    def committed(self, end: Cursor, first_page: int) -> None:
        """Tells that the pages from `first_page` to `end` are new."""
        if self._policy is WritePolicy.WRITE_THROUGH:
            self._enqueue(end, first_page)

    def used(self, end: Cursor) -> None:
        """Tells that the pages up to `end` were found by a prompt."""
        if self._policy is not WritePolicy.WRITE_THROUGH_SELECTIVE:
            return
        for node, start, stop in self._index.tree.path(end):
            unwritten = ~node.stored[start:stop] if self._has_redis else node.host[start:stop] == NO_SLOT
            # The commit was the first hit.
            if node.hits > self._after_hits and unwritten.any():
                self._enqueue(Cursor(node, node.first_page + stop), node.first_page + start)

    def _enqueue(self, end: Cursor, first_page: int) -> None:
        run = self._index.run(end, first_page)
        if self._num_queued + run.num_pages > max(1, self._index.device.num_slots // _MAX_QUEUED_SHARE):
            self._metrics.writes_skipped.inc(run.num_pages)
            return
        self._index.device.hold(run.device)
        self._queue.append(run)
        self._num_queued += run.num_pages
        self._work.set()

    async def run(self) -> None:
        """Writes what is queued, for ever."""
        while True:
            await self._work.wait()
            while self._queue:
                async with self.turn:
                    await self._write_next()
            self._work.clear()

    async def _write_next(self) -> None:
        run = self._queue.popleft()
        batch, rest = part_of(run, 0, min(_BATCH_PAGES, run.num_pages)), None
        if run.num_pages > batch.num_pages:
            rest = part_of(run, batch.num_pages, run.num_pages)
            self._queue.appendleft(rest)
        self._num_queued -= batch.num_pages
        try:
            await self._write(batch)
        finally:
            self._index.device.release(batch.device)

    async def _write(self, run: PageRun) -> int:
        """Writes a run, whose device slots are held, to host memory and Redis; returns the pages Redis lacks."""
        copies = await self._reclaimer.copy_to_host(run)
        try:
            copied = Cursor(run.cursor.node, run.first_page + copies.size)
            lacking = await self._reclaimer.store(self._index.run(copied, run.first_page)) if self._has_redis else 0
        finally:
            self._index.host.release(copies)
        return lacking + run.num_pages - copies.size

    async def write_all(self, run: PageRun, deadline: float) -> int:
        """Writes a run to Redis, wherever its pages are, and returns the pages Redis lacks.

        Begins no batch after `deadline` (seconds of the monotonic clock).
        """
        num_device = int(np.count_nonzero(run.device != NO_SLOT))
        on_device, on_host = part_of(run, 0, num_device), part_of(run, num_device, run.num_pages)
        self._index.device.hold(on_device.device)
        self._index.host.hold(on_host.host)
        try:
            lacking = 0
            for whole, write in ((on_device, self._write), (on_host, self._reclaimer.store)):
                for start in range(0, whole.num_pages, _BATCH_PAGES):
                    batch = part_of(whole, start, min(start + _BATCH_PAGES, whole.num_pages))
                    if time.monotonic() >= deadline:
                        lacking += int(np.count_nonzero(~batch.stored))
                    elif not batch.stored.all():
                        lacking += await write(batch)
            return lacking
        finally:
            self._index.device.release(on_device.device)
            self._index.host.release(on_host.host)
