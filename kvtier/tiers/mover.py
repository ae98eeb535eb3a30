"""The only thing that copies pages between tiers.

Copies run in threads, never on the event loop. The caller holds every slot it names until the copy has ended, and
publishes only what ended well. Transfer rates are measured on the way: they decide whether a promotion is worth it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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

_COPY_THREADS = 2  # a direction: while one waits for its copy to end, the other queues the next one behind it
_RATE_WEIGHT = 0.2  # of the newest transfer in the moving average


class Mover:
    """Moves pages of one cache between its device pool, its host pool and Redis."""

    def __init__(self, device: DevicePool, host: HostPool, redis: RedisTier | None, metrics: Metrics) -> None:
        self._device = device
        self._host = host
        self._redis = redis
        self._metrics = metrics
        self._down = ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="kvtier-spill")
        self._up = ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="kvtier-promote")
        self._bytes_per_second: dict[Route, float] = {}

    @property
    def has_redis(self) -> bool:
        return self._redis is not None

    def seconds_for(self, route: Route, num_pages: int) -> float:
        """What moving pages took of late; 0 while nothing has been measured."""
        rate = self._bytes_per_second.get(route)
        return num_pages * self._host.page_bytes / rate if rate else 0.0

    async def spill(self, device_slots: SlotArray, host_slots: SlotArray) -> None:
        """Copies pages from the device into host slots; raises `GpuError` when that fails, which is counted."""
        with self._counting(Route.DEVICE_TO_HOST, device_slots.size):
            await self._run(self._down, self._device.read_pages, device_slots, host_slots)

    async def promote(self, host_slots: SlotArray, device_slots: SlotArray) -> None:
        """Copies pages from host slots to the device; raises `GpuError` when that fails, which is counted."""
        with self._counting(Route.HOST_TO_DEVICE, device_slots.size):
            await self._run(self._up, self._device.write_pages, device_slots, host_slots)

    async def _run(
        self,
        threads: ThreadPoolExecutor,
        copy: Callable[[SlotArray, HostPool, SlotArray], None],
        device_slots: SlotArray,
        host_slots: SlotArray,
    ) -> None:
        await asyncio.get_running_loop().run_in_executor(threads, copy, device_slots, self._host, host_slots)

    @contextlib.contextmanager
    def _counting(self, route: Route, num_pages: int) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        except GpuError as error:
            _log.error("%s of %d pages failed: %s", route, num_pages, error)
            self._count(route, "failed", num_pages, 0.0)
            raise
        self._count(route, "moved", num_pages, time.perf_counter() - start)

    async def store(self, namespace: str, names: Sequence[PageName], host_slots: SlotArray) -> BoolArray:
        """Writes pages to Redis; returns which of them it has now. Failures are counted, never raised."""
        redis = self._redis
        if redis is None:
            return np.zeros(len(names), dtype=np.bool_)

        async def put(name: PageName, slot: int) -> str:
            try:
                await redis.put(namespace, name, self._host.image(slot))
            except RedisFullError:
                return "full"
            except RedisUnavailableError:
                return "failed"
            return "moved"

        return await self._each(Route.HOST_TO_REDIS, put, names, host_slots)

    async def fetch(self, namespace: str, names: Sequence[PageName], host_slots: SlotArray) -> BoolArray:
        """Reads pages from Redis into host slots; returns which of them arrived whole and verified."""
        redis = self._redis
        if redis is None:
            return np.zeros(len(names), dtype=np.bool_)

        async def get(name: PageName, slot: int) -> str:
            try:
                return "moved" if await redis.get(namespace, name, self._host.image(slot)) else "missing"
            except CorruptPageError:
                return "corrupt"
            except RedisUnavailableError:
                return "failed"

        return await self._each(Route.REDIS_TO_HOST, get, names, host_slots)

    async def count_stored(self, namespace: str, names: Sequence[PageName]) -> int:
        """How many leading pages Redis has; 0 while it does not answer."""
        if self._redis is None or not names:
            return 0
        try:
            return await self._redis.count_prefix(namespace, names)
        except RedisUnavailableError:
            return 0

    async def _each(
        self,
        route: Route,
        move: Callable[[PageName, int], Coroutine[Any, Any, str]],
        names: Sequence[PageName],
        host_slots: SlotArray,
    ) -> BoolArray:
        start = time.perf_counter()
        outcomes = await asyncio.gather(*map(move, names, host_slots.tolist()))
        seconds = time.perf_counter() - start
        for outcome in sorted(set(outcomes)):
            self._count(route, outcome, outcomes.count(outcome), seconds)
        return np.array([outcome == "moved" for outcome in outcomes], dtype=np.bool_)

    def _count(self, route: Route, outcome: str, num_pages: int, seconds: float) -> None:
        self._metrics.transfer_pages.labels(route, outcome).inc(num_pages)
        if outcome != "moved" or num_pages == 0:
            return
        num_bytes = num_pages * self._host.page_bytes
        self._metrics.transfer_bytes.labels(route).inc(num_bytes)
        self._metrics.transfer_seconds.labels(route).inc(seconds)
        rate = num_bytes / max(seconds, 1e-9)
        before = self._bytes_per_second.get(route, rate)
        self._bytes_per_second[route] = before + _RATE_WEIGHT * (rate - before)

    def close(self) -> None:
        """Waits for running copies."""
        self._down.shutdown(wait=True)
        self._up.shutdown(wait=True)
