"""What operators ask of a daemon: flush, pin, statistics, drain."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import NamedTuple

import kvtier
from kvtier.cache import Drained, PrefixCache, Prompt
from kvtier.daemon.registry import CacheRegistry
from kvtier.daemon.sessions import Sessions
from kvtier.errors import PinUnknownError
from kvtier.index.pool import SlotPool
from kvtier.metrics import Gauge
from kvtier.pages.chain import check_namespace
from kvtier.protocol import identity_to_message
from kvtier.tiers.base import Tier
from kvtier.tiers.breaker import BreakerState
from kvtier.tiers.redis import RedisTier
from kvtier.v1 import admin_pb2 as admin


class Flushed(NamedTuple):
    """Numbers of pages removed by tier, and kept because something holds them."""

    device: int
    host: int
    redis: int
    kept: int


class Operator:
    """Calls that concern all caches of a daemon."""

    def __init__(self, sessions: Sessions, redis: RedisTier | None) -> None:
        self.registry: CacheRegistry = sessions.registry
        self._sessions = sessions
        self._redis = redis
        self._started = time.monotonic()
        self._pins: dict[int, tuple[PrefixCache, int]] = {}
        self._pin_ids = itertools.count(1)
        self._drains: set[asyncio.Task[Drained]] = set()

    async def flush(self, namespace: str) -> Flushed:
        """Removes a namespace from every tier; raises `RedisUnavailableError` when Redis cannot be flushed."""
        check_namespace(namespace)
        removed = await self._flush_memory(namespace)
        if self._redis is None:
            return removed
        in_redis = await self._redis.flush_namespace(namespace)
        # Once more, for what came up from Redis in the meantime.
        again = await self._flush_memory(namespace)
        return Flushed(removed.device + again.device, removed.host + again.host, in_redis, again.kept)

    async def _flush_memory(self, namespace: str) -> Flushed:
        removed = [await cache.flush(namespace) for cache in self.registry]
        return Flushed(sum(r.device for r in removed), sum(r.host for r in removed), 0, sum(r.kept for r in removed))

    def pin(self, cache: PrefixCache, prompt: Prompt, ttl_s: int) -> tuple[int, int]:
        """Pins what a prompt has on the device; returns the pin's id and the tokens pinned."""
        lease_id, pinned_tokens = cache.pin(prompt, time.monotonic() + ttl_s)
        pin_id = next(self._pin_ids)
        self._pins[pin_id] = (cache, lease_id)
        return pin_id, pinned_tokens

    def unpin(self, pin_id: int) -> None:
        """Ends a pin; raises `PinUnknownError`."""
        self.sweep()
        if pin_id not in self._pins:
            raise PinUnknownError(f"pin {pin_id} was removed, has run out, or never was")
        cache, lease_id = self._pins.pop(pin_id)
        cache.unpin(lease_id)

    def sweep(self) -> None:
        """Frees what has run out in every cache."""
        now = time.monotonic()
        for cache in self.registry:
            cache.sweep(now)
        self._pins = {pin_id: pin for pin_id, pin in self._pins.items() if pin[0].has_pin(pin[1])}

    async def drain(self, timeout_s: float) -> Drained:
        """Refuses new leases from now on, and writes what Redis lacks."""
        self._sessions.draining = True
        # NOTE: In a task of its own: gRPC cancels this one when the caller goes, and whoever copies has to see it end.
        task = asyncio.create_task(self._write_all(time.monotonic() + timeout_s))
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)
        return await asyncio.shield(task)

    async def _write_all(self, deadline: float) -> Drained:
        drained = [await cache.drain(max(0.0, deadline - time.monotonic())) for cache in self.registry]
        return Drained(sum(d.stored_pages for d in drained), sum(d.unstored_pages for d in drained))

    async def close(self) -> None:
        """Breaks off what callers left under way; the caches are to be closed next."""
        for task in self._drains:
            task.cancel()
        if self._drains:
            await asyncio.wait(self._drains)

    # --- figures -----------------------------------------------------------------------------------------------------

    def statistics(self) -> admin.GetStatisticsResponse:
        """What `kvtier stats` shows."""
        redis = admin.RedisStatistics(configured=self._redis is not None)
        if self._redis is not None:
            redis.breaker, redis.last_error = self._redis.breaker.state, self._redis.breaker.last_error
        return admin.GetStatisticsResponse(
            epoch=self._sessions.epoch,
            caches=[_cache_statistics(cache) for cache in self.registry],
            redis=redis,
            sessions=self._sessions.num_open,
            draining=self._sessions.draining,
            version=kvtier.__version__,
            uptime_seconds=time.monotonic() - self._started,
        )

    def gauges(self) -> Iterator[Gauge]:
        """Read at each scrape of /metrics."""
        yield Gauge("sessions", "Open sessions.", {}, self._sessions.num_open)
        yield Gauge("draining", "1 while the daemon gives no new leases.", {}, self._sessions.draining)
        for cache in self.registry:
            index, label = cache.index, {"cache": cache.identity.fingerprint.hex()[:16], "model": cache.identity.model}
            yield Gauge("leases", "Open leases.", label, cache.num_leases)
            yield Gauge("pins", "Pins in force.", label, cache.num_pins)
            yield Gauge("tree_pages", "Pages in the radix tree.", label, index.tree.num_pages)
            yield Gauge("tree_nodes", "Nodes of the radix tree.", label, index.tree.num_nodes)
            yield Gauge("page_bytes", "Bytes of a page on one rank.", label, cache.identity.layout.page_bytes)
            pinned = sum(rank.device.pinned_bytes for rank in cache.ranks)
            yield Gauge("host_pinned_bytes", "Bytes of the host pool that are pinned for the GPU.", label, pinned)
            for tier, pool in ((Tier.DEVICE, index.device), (Tier.HOST, index.host)):
                held = cache.num_held(tier)
                used = pool.num_slots - pool.num_free
                for state, pages in (("free", pool.num_free), ("held", held), ("evictable", used - held)):
                    labels = {**label, "tier": tier.value, "state": state}
                    yield Gauge("pages", "Pages of the pools, by tier and state.", labels, pages)
        if self._redis is not None:
            for state in BreakerState:
                is_state = self._redis.breaker.state == state
                yield Gauge("redis_breaker", "1 for the breaker's state.", {"state": state.value}, is_state)


def _pool_statistics(pool: SlotPool, num_held: int) -> admin.PoolStatistics:
    return admin.PoolStatistics(pages=pool.num_slots, free_pages=pool.num_free, held_pages=num_held)


def _cache_statistics(cache: PrefixCache) -> admin.CacheStatistics:
    found = cache.tokens_found
    return admin.CacheStatistics(
        fingerprint=cache.identity.fingerprint,
        identity=identity_to_message(cache.identity),
        page_bytes=cache.identity.layout.page_bytes,
        device=_pool_statistics(cache.index.device, cache.num_held(Tier.DEVICE)),
        host=_pool_statistics(cache.index.host, cache.num_held(Tier.HOST)),
        tree_pages=cache.index.tree.num_pages,
        tree_nodes=cache.index.tree.num_nodes,
        leases=cache.num_leases,
        pins=cache.num_pins,
        tokens_asked=cache.tokens_asked,
        tokens_found=admin.TokensByTierTotal(device=found.device, host=found.host, redis=found.redis),
    )
