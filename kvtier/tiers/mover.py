"""The only thing that copies pages between tiers.

A page has an image on every tensor-parallel rank, under the same slot of that rank's pools, and moves as a whole: it
has arrived when all its images have. Copies run in threads, never on the event loop. The caller holds every slot it
names until the copy has ended, and publishes only what ended well. Transfer rates are measured on the way: they decide
whether a promotion is worth it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kvtier.errors import CorruptPageError, GpuError, RedisFullError, RedisUnavailableError
from kvtier.index.pool import SlotArray
from kvtier.index.radix import BoolArray
from kvtier.metrics import Metrics
from kvtier.pages.envelope import PageName
from kvtier.tiers.base import DevicePool, Route
from kvtier.tiers.host import HostPool
from kvtier.tiers.redis import RedisTier

_log = logging.getLogger(__name__)

T = TypeVar("T")

_COPY_THREADS = 2  # a rank and direction: while one waits for its copy to end, the other queues the next one behind it
_RATE_WEIGHT = 0.2  # of the newest transfer in the moving average
_MOVED = "moved"


class RankPools(NamedTuple):
    """The pools of one tensor-parallel rank; `fingerprint` and `rank` are in the names of its stored images."""

    fingerprint: bytes
    rank: int
    device: DevicePool
    host: HostPool

    def page_name(self, key: bytes) -> PageName:
        """What this rank's image of a page is called in storage."""
        return PageName(self.fingerprint, key, self.rank)


class Mover:
    """Moves pages of one cache between its device pools, its host pools and Redis.

    `ranks` have as many pages each.
    """

    def __init__(self, ranks: Sequence[RankPools], redis: RedisTier | None, metrics: Metrics) -> None:
        self.ranks = ranks
        self._page_bytes = sum(rank.host.page_bytes for rank in ranks)
        self._redis = redis
        self._metrics = metrics
        num_threads = _COPY_THREADS * len(ranks)
        self._down = ThreadPoolExecutor(num_threads, thread_name_prefix="kvtier-spill")
        self._up = ThreadPoolExecutor(num_threads, thread_name_prefix="kvtier-promote")
        self._bytes_per_second: dict[Route, float] = {}

    @property
    def has_redis(self) -> bool:
        return self._redis is not None

    def seconds_for(self, route: Route, num_pages: int) -> float:
        """What moving pages took of late; 0 while nothing has been measured."""
        rate = self._bytes_per_second.get(route)
        return num_pages * self._page_bytes / rate if rate else 0.0

    async def spill(self, device_slots: SlotArray, host_slots: SlotArray) -> None:
        """Copies pages from the device into host slots; raises `GpuError` when that fails, which is counted."""
        with self._counting(Route.DEVICE_TO_HOST, device_slots.size):
            await self._copy(self._down, [rank.device.read_pages for rank in self.ranks], device_slots, host_slots)

    async def promote(self, host_slots: SlotArray, device_slots: SlotArray) -> None:
        """Copies pages from host slots to the device; raises `GpuError` when that fails, which is counted."""
        with self._counting(Route.HOST_TO_DEVICE, device_slots.size):
            await self._copy(self._up, [rank.device.write_pages for rank in self.ranks], device_slots, host_slots)

    async def _copy(
        self,
        threads: ThreadPoolExecutor,
        copies: Sequence[Callable[[SlotArray, HostPool, SlotArray], None]],
        device_slots: SlotArray,
        host_slots: SlotArray,
    ) -> None:
        """Carries out one copy a rank, side by side."""
        run = asyncio.get_running_loop().run_in_executor
        await until_all_ended(
            [
                run(threads, copy, device_slots, rank.host, host_slots)
                for copy, rank in zip(copies, self.ranks, strict=True)
            ]
        )

    @contextlib.contextmanager
    def _counting(self, route: Route, num_pages: int) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        except GpuError as error:
            _log.error("%s of %d pages failed: %s", route, num_pages, error)
            self._count(route, "failed", num_pages, 0.0)
            raise
        self._count(route, _MOVED, num_pages, time.perf_counter() - start)

    async def store(self, namespace: str, keys: Sequence[bytes], host_slots: SlotArray) -> BoolArray:
        """Writes pages to Redis; returns which of them it has now. Failures are counted, never raised."""
        redis = self._redis
        if redis is None:
            return np.zeros(len(keys), dtype=np.bool_)

        async def put(rank: RankPools, key: bytes, slot: int) -> str:
            try:
                await redis.put(namespace, rank.page_name(key), rank.host.image(slot))
            except RedisFullError:
                return "full"
            except RedisUnavailableError:
                return "failed"
            return _MOVED

        return await self._each(Route.HOST_TO_REDIS, put, keys, host_slots)

    async def fetch(self, namespace: str, keys: Sequence[bytes], host_slots: SlotArray) -> BoolArray:
        """Reads pages from Redis into host slots; returns which of them arrived whole and verified."""
        redis = self._redis
        if redis is None:
            return np.zeros(len(keys), dtype=np.bool_)

        async def get(rank: RankPools, key: bytes, slot: int) -> str:
            try:
                found = await redis.get(namespace, rank.page_name(key), rank.host.image(slot))
                return _MOVED if found else "missing"
            except CorruptPageError:
                return "corrupt"
            except RedisUnavailableError:
                return "failed"

        return await self._each(Route.REDIS_TO_HOST, get, keys, host_slots)

    async def count_stored(self, namespace: str, keys: Sequence[bytes]) -> int:
        """How many leading pages Redis has; 0 while it does not answer."""
        if self._redis is None:
            return 0
        count = len(keys)
        for rank in self.ranks:
            names = [rank.page_name(key) for key in keys[:count]]
            try:
                count = await self._redis.count_prefix(namespace, names)
            except RedisUnavailableError:
                return 0
        return count

    async def still_stored(self, namespace: str, keys: Sequence[bytes]) -> BoolArray:
        """Which of the pages that were written to Redis it has still; all of them while it does not answer."""
        stored = np.ones(len(keys), dtype=np.bool_)
        if self._redis is not None:
            with contextlib.suppress(RedisUnavailableError):
                for rank in self.ranks:
                    stored &= await self._redis.which_exist(namespace, [rank.page_name(key) for key in keys])
        return stored

    async def _each(
        self,
        route: Route,
        move: Callable[[RankPools, bytes, int], Coroutine[Any, Any, str]],
        keys: Sequence[bytes],
        host_slots: SlotArray,
    ) -> BoolArray:
        start = time.perf_counter()
        pages = list(zip(keys, host_slots.tolist(), strict=True))
        of_ranks = await until_all_ended(
            [until_all_ended([move(rank, key, slot) for key, slot in pages]) for rank in self.ranks]
        )
        outcomes = [_of_page(images) for images in zip(*of_ranks, strict=True)]
        seconds = time.perf_counter() - start
        for outcome in sorted(set(outcomes)):
            self._count(route, outcome, outcomes.count(outcome), seconds)
        return np.array([outcome == _MOVED for outcome in outcomes], dtype=np.bool_)

    def _count(self, route: Route, outcome: str, num_pages: int, seconds: float) -> None:
        self._metrics.transfer_pages.labels(route, outcome).inc(num_pages)
        if outcome != _MOVED or num_pages == 0:
            return
        num_bytes = num_pages * self._page_bytes
        self._metrics.transfer_bytes.labels(route).inc(num_bytes)
        self._metrics.transfer_seconds.labels(route).inc(seconds)
        rate = num_bytes / max(seconds, 1e-9)
        before = self._bytes_per_second.get(route, rate)
        self._bytes_per_second[route] = before + _RATE_WEIGHT * (rate - before)

    def close(self) -> None:
        """Waits for running copies."""
        self._down.shutdown(wait=True)
        self._up.shutdown(wait=True)


async def until_all_ended(works: Sequence[Awaitable[T]]) -> list[T]:
    """Results of works side by side; raises when all have ended and one has failed.

    What they use, slots for example, is free then, which `asyncio.gather` alone does not promise.
    """
    results = []
    for outcome in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results


def _of_page(images: Sequence[str]) -> str:
    """The outcome of a page by those of its images."""
    return next((outcome for outcome in images if outcome != _MOVED), _MOVED)
