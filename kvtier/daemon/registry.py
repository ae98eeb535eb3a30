"""The caches of a daemon: one a fingerprint, in equal parts of the pools' memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.cache import PrefixCache, WritePolicy
from kvtier.config import Config, Share
from kvtier.daemon.devices import Device, Devices
from kvtier.daemon.supervisor import Supervisor
from kvtier.errors import CacheFullError, CacheUnknownError, ConfigurationError, InvalidRequestError
from kvtier.metrics import Metrics
from kvtier.pages.fingerprint import CacheIdentity
from kvtier.tiers.host import HostPool
from kvtier.tiers.mover import Mover, RankPools
from kvtier.tiers.redis import RedisTier

_log = logging.getLogger(__name__)

_MIN_PAGES = 16


class _PagesInPools(NamedTuple):
    """Of every rank."""

    device: int
    host: int


@dataclass
class _Open:
    """A cache, where the pools of its ranks lie, and the sessions that use it."""

    cache: PrefixCache
    devices: list[Device]
    session_ids: set[int] = field(default_factory=set)
    is_closing: bool = False  # nobody gets it any more; a flush still finds it


class CacheRegistry:
    """Opens a cache when a worker first attaches with its fingerprint.

    When all parts of the memory are taken, the cache that has been without sessions the longest is written to Redis and
    closed.
    """

    def __init__(
        self,
        config: Config,
        memory_prefix: str,
        devices: Devices,
        redis: RedisTier | None,
        supervisor: Supervisor,
        metrics: Metrics,
    ) -> None:
        self._devices = devices
        self._config = config
        self._memory_prefix = memory_prefix
        self._redis = redis
        self._supervisor = supervisor
        self._metrics = metrics
        self._open: dict[bytes, _Open] = {}  # by fingerprint of rank 0, least recently attached first
        self._device_bytes: dict[Device, int] = {}
        self._opened = itertools.count()
        self._turn = asyncio.Lock()

    def __iter__(self) -> Iterator[PrefixCache]:
        return iter([opened.cache for opened in self._open.values()])

    def get(self, fingerprint: bytes) -> PrefixCache:
        """Raises `CacheUnknownError` when no worker attached with this fingerprint (that of rank 0)."""
        opened = self._open.get(fingerprint)
        if opened is None or opened.is_closing:
            raise CacheUnknownError(
                f"no cache has fingerprint {fingerprint.hex() or '(empty)'}; it opens when a worker attaches "
                "(`kvtier stats` lists the open ones)"
            )
        return opened.cache

    async def attach(self, identity: CacheIdentity, device_uuids: Sequence[str], session_id: int) -> PrefixCache:
        """The cache of `identity` and the other ranks, opened if need be, in use by this session until `detach`.

        `device_uuids` names the GPU of every rank, or none.
        """
        devices = self._devices.of_ranks(device_uuids, identity.world_size)
        leader = identity.of_rank(0)
        async with self._turn:
            opened = self._open.get(leader.fingerprint)
            if opened is None:
                pages = self._pages_in_pools(leader, devices)
                if len(self._open) >= self._config.max_caches:
                    await self._close_idle()
                opened = _Open(await self._open_cache(leader, devices, pages), devices)
            elif device_uuids and devices != opened.devices:
                raise InvalidRequestError(
                    f"the cache of {leader.model} lies on other GPUs than {', '.join(device_uuids)}; run its workers "
                    "where the first ones ran, or a daemon for each replica of the model"
                )
            self._open.pop(leader.fingerprint, None)
            self._open[leader.fingerprint] = opened
            opened.session_ids.add(session_id)
            return opened.cache

    def detach(self, cache: PrefixCache, session_id: int) -> None:
        """Tells that a session has ended."""
        self._open[cache.identity.fingerprint].session_ids.discard(session_id)

    async def _open_cache(self, leader: CacheIdentity, devices: list[Device], pages: _PagesInPools) -> PrefixCache:
        # Taking gigabytes of memory takes seconds: not on the event loop.
        ranks = await asyncio.to_thread(self._allocate, leader, devices, pages)
        mover = Mover(ranks, self._redis, self._metrics)
        policy, after_hits = WritePolicy(self._config.write_policy), self._config.write_after_hits
        cache = PrefixCache(leader, mover, policy, after_hits, self._metrics)
        self._supervisor.start(_writer_name(cache), cache.writer.run)
        _log.info(
            "opened cache %s of %s (%s): %d device and %d host pages of %d bytes on each of %d ranks",
            leader.fingerprint.hex()[:16],
            leader.model,
            leader.layout.page_format,
            pages.device,
            pages.host,
            leader.layout.page_bytes,
            leader.world_size,
        )
        return cache

    def _allocate(self, leader: CacheIdentity, devices: list[Device], pages: _PagesInPools) -> list[RankPools]:
        number, page_bytes = next(self._opened), leader.layout.page_bytes
        ranks = []
        with contextlib.ExitStack() as stack:  # closes what is open when the next does not fit
            for rank, memory in enumerate(devices):
                prefix = f"{self._memory_prefix}{number}-{rank}"
                device = memory.open_pool(f"{prefix}-device", pages.device, page_bytes)
                stack.callback(device.close)
                host = HostPool(f"{prefix}-host", pages.host, page_bytes, memory.local_cpus())
                stack.callback(host.close)
                ranks.append(RankPools(leader.of_rank(rank).fingerprint, rank, device, host))
            stack.pop_all()
        for pools in ranks:
            pools.device.pin(pools.host)
        return ranks

    def _pages_in_pools(self, leader: CacheIdentity, devices: list[Device]) -> _PagesInPools:
        on_device = min(
            self._num_pages("device_bytes", self._bytes_on(device), leader, devices.count(device)) for device in devices
        )
        return _PagesInPools(
            on_device, self._num_pages("host_bytes", self._config.host_bytes, leader, leader.world_size)
        )

    def _bytes_on(self, device: Device) -> int:
        """For all caches together; of a share, what that is when the first one opens there."""
        size = self._config.device_bytes
        if device not in self._device_bytes:
            self._device_bytes[device] = int(size * device.free_bytes()) if isinstance(size, Share) else size
        return self._device_bytes[device]

    def _num_pages(self, setting: str, total_bytes: int, leader: CacheIdentity, num_ranks: int) -> int:
        """Pages of a pool when that many ranks have one in this memory."""
        parts, page_bytes = self._config.max_caches, leader.layout.page_bytes * num_ranks
        num_pages = total_bytes // parts // page_bytes
        if num_pages < _MIN_PAGES:
            raise ConfigurationError(
                f"{setting} is {total_bytes:,} for {parts} caches; a page of {leader.model} has {page_bytes:,} bytes "
                f"and a pool needs at least {_MIN_PAGES}: set {setting} to {_MIN_PAGES * page_bytes * parts:,} or more"
            )
        return num_pages

    async def _close_idle(self) -> None:
        idle = next(
            (key for key, opened in self._open.items() if not opened.session_ids and not opened.cache.num_pins), None
        )
        if idle is None:
            raise CacheFullError(
                f"all {self._config.max_caches} parts of the pools are in use by other models; detach their workers "
                "and remove their pins, or start the daemon with a larger --max-caches"
            )
        opened = self._open[idle]
        opened.is_closing = True
        try:
            await opened.cache.drain(self._config.drain_s)
        finally:
            await self._close(idle)

    async def _close(self, fingerprint: bytes) -> None:
        cache = self._open[fingerprint].cache
        await self._supervisor.stop(_writer_name(cache))
        # NOTE: In sight of a flush until here, for what it writes to Redis until then must be flushed too.
        try:
            await cache.close()
        finally:
            del self._open[fingerprint]
        _log.info("closed cache %s", cache.identity.fingerprint.hex()[:16])

    async def close(self) -> None:
        """Closes all caches; what they hold and Redis lacks is lost, unless drained before."""
        for fingerprint in list(self._open):
            await self._close(fingerprint)


def _writer_name(cache: PrefixCache) -> str:
    return f"writer-{cache.identity.fingerprint.hex()[:16]}"
