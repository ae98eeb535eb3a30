"""The caches of a daemon: one a fingerprint, in equal parts of the pools' memory."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Iterator
from typing import NamedTuple

from kvtier.cache import PrefixCache, WritePolicy
from kvtier.config import Config, Share
from kvtier.daemon.devices import PoolMemory
from kvtier.daemon.supervisor import Supervisor
from kvtier.errors import CacheFullError, CacheUnknownError, ConfigurationError, InvalidRequestError
from kvtier.metrics import Metrics
from kvtier.pages.fingerprint import CacheIdentity
from kvtier.tiers.base import DevicePool
from kvtier.tiers.host import HostPool
from kvtier.tiers.mover import Mover
from kvtier.tiers.redis import RedisTier

_log = logging.getLogger(__name__)

_MIN_PAGES = 16


class _PagesInPools(NamedTuple):
    device: int
    host: int


class CacheRegistry:
    """Opens a cache when a worker first attaches with its fingerprint.

    When all parts of the memory are taken, the cache that has been without sessions the longest is written to Redis and
    closed.
    """

    def __init__(
        self,
        config: Config,
        pool_prefix: str,
        device_memory: PoolMemory,
        redis: RedisTier | None,
        supervisor: Supervisor,
        metrics: Metrics,
    ) -> None:
        self.device_memory = device_memory
        self._config = config
        self._pool_prefix = pool_prefix
        self._redis = redis
        self._supervisor = supervisor
        self._metrics = metrics
        self._caches: dict[bytes, PrefixCache] = {}  # least recently attached first
        self._sessions: dict[bytes, set[int]] = {}
        self._opened = itertools.count()
        self._turn = asyncio.Lock()

    def __iter__(self) -> Iterator[PrefixCache]:
        return iter(list(self._caches.values()))

    def get(self, fingerprint: bytes) -> PrefixCache:
        """Raises `CacheUnknownError` when no worker attached with this fingerprint."""
        cache = self._caches.get(fingerprint)
        if cache is None:
            raise CacheUnknownError(
                f"no cache has fingerprint {fingerprint.hex() or '(empty)'}; it opens when a worker attaches "
                "(`kvtier stats` lists the open ones)"
            )
        return cache

    async def attach(self, identity: CacheIdentity, session_id: int) -> PrefixCache:
        """The cache of `identity`, opened if need be, in use by this session until `detach`."""
        if identity.world_size != 1:
            raise InvalidRequestError(
                f"world_size is {identity.world_size}: this release serves models whose KV heads are on one device"
            )
        async with self._turn:
            fingerprint = identity.fingerprint
            cache = self._caches.pop(fingerprint, None)
            if cache is None:
                pages = self._pages_in_pools(identity)
                if len(self._caches) >= self._config.max_caches:
                    await self._close_idle()
                cache = await self._open(identity, pages)
            self._caches[fingerprint] = cache
            self._sessions.setdefault(fingerprint, set()).add(session_id)
            return cache

    def detach(self, cache: PrefixCache, session_id: int) -> None:
        """Tells that a session has ended."""
        self._sessions[cache.identity.fingerprint].discard(session_id)

    async def _open(self, identity: CacheIdentity, pages: _PagesInPools) -> PrefixCache:
        # Taking gigabytes of memory takes seconds: not on the event loop.
        device, host = await asyncio.to_thread(self._allocate, identity.layout.page_bytes, pages)
        mover = Mover(device, host, self._redis, self._metrics)
        policy, after_hits = WritePolicy(self._config.write_policy), self._config.write_after_hits
        cache = PrefixCache(identity, device, host, mover, policy, after_hits, self._metrics)
        self._supervisor.start(_writer_name(cache), cache.writer.run)
        _log.info(
            "opened cache %s of %s (%s): %d device and %d host pages of %d bytes",
            identity.fingerprint.hex()[:16],
            identity.model,
            identity.layout.page_format,
            device.num_pages,
            host.num_pages,
            host.page_bytes,
        )
        return cache

    def _allocate(self, page_bytes: int, pages: _PagesInPools) -> tuple[DevicePool, HostPool]:
        prefix = f"{self._pool_prefix}{next(self._opened)}"
        device = self.device_memory.open_pool(f"{prefix}-device", pages.device, page_bytes)
        try:
            host = HostPool(f"{prefix}-host", pages.host, page_bytes)
        except BaseException:
            device.close()
            raise
        device.pin(host)
        return device, host

    @functools.cached_property
    def _device_bytes(self) -> int:
        """Of all caches together; of a share, what that is when the first one opens."""
        size = self._config.device_bytes
        return int(size * self.device_memory.free_bytes()) if isinstance(size, Share) else size

    def _pages_in_pools(self, identity: CacheIdentity) -> _PagesInPools:
        return _PagesInPools(
            self._num_pages("device_bytes", self._device_bytes, identity),
            self._num_pages("host_bytes", self._config.host_bytes, identity),
        )

    def _num_pages(self, setting: str, total_bytes: int, identity: CacheIdentity) -> int:
        parts, page_bytes = self._config.max_caches, identity.layout.page_bytes
        num_pages = total_bytes // parts // page_bytes
        if num_pages < _MIN_PAGES:
            raise ConfigurationError(
                f"{setting} is {total_bytes:,} for {parts} caches; a page of {identity.model} has {page_bytes:,} bytes "
                f"and a pool needs at least {_MIN_PAGES}: set {setting} to {_MIN_PAGES * page_bytes * parts:,} or more"
            )
        return num_pages

    async def _close_idle(self) -> None:
        used = {key for key, cache in self._caches.items() if self._sessions[key] or cache.num_pins}
        idle = next((key for key in self._caches if key not in used), None)
        if idle is None:
            raise CacheFullError(
                f"all {self._config.max_caches} parts of the pools are in use by other models; detach their workers "
                "and remove their pins, or start the daemon with a larger --max-caches"
            )
        cache = self._caches.pop(idle)
        await cache.drain(self._config.drain_s)
        await self._close(cache)

    async def _close(self, cache: PrefixCache) -> None:
        await self._supervisor.stop(_writer_name(cache))
        await cache.close()
        _log.info("closed cache %s", cache.identity.fingerprint.hex()[:16])

    async def close(self) -> None:
        """Closes all caches; what they hold and Redis lacks is lost, unless drained before."""
        while self._caches:
            await self._close(self._caches.popitem()[1])


def _writer_name(cache: PrefixCache) -> str:
    return f"writer-{cache.identity.fingerprint.hex()[:16]}"
