"""What operators ask of a daemon: flush, pin, statistics, drain, health, reflection; and caches that come and go."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import grpc
import numpy as np
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from serving import (
    IDENTITY,
    PAGE_BYTES,
    PAGE_SIZE,
    Valkey,
    attach,
    eventually,
    only_cache,
    other_identity,
    small_config,
    some_tokens,
    state_of,
    store,
)

import kvtier
from kvtier.cache import PrefixCache, Prompt
from kvtier.client import AsyncSession, Client, TokensByTier
from kvtier.daemon.devices import SharedMemoryDevice
from kvtier.daemon.operator import Operator
from kvtier.daemon.server import running
from kvtier.errors import CacheFullError, CacheUnknownError, DaemonError, DrainingError, PinUnknownError
from kvtier.index.pool import SlotArray
from kvtier.tiers.base import Tier
from kvtier.tiers.device import SharedMemoryDevicePool
from kvtier.tiers.host import HostPool
from kvtier.v1 import admin_pb2, admin_pb2_grpc

T = TypeVar("T")
PROMPT = some_tokens(8, seed=1)
ALL = PROMPT.size
KNOWN = IDENTITY.fingerprint


async def ask(directory: Path, call: Callable[[Client], T]) -> T:
    """One call of the blocking client, beside the daemon's event loop."""

    def blocking() -> T:
        with Client(f"unix:{directory}/kvtier.sock") as client:
            return call(client)

    return await asyncio.to_thread(blocking)


async def where(directory: Path, namespace: str, seed: int = 1) -> TokensByTier:
    return await ask(directory, lambda client: client.lookup(KNOWN, namespace, some_tokens(8, seed)))


async def press(session: AsyncSession, num_prompts: int, namespace: str = "pressure") -> None:
    for seed in range(100, 100 + num_prompts):
        await store(session, namespace, some_tokens(8, seed))


async def idle_cache(directory: Path, operator: Operator) -> PrefixCache:
    """The only cache of a daemon, with more pages than one write to Redis takes; its worker has gone."""
    async with await attach(directory) as session:
        for seed in range(24):
            await store(session, "tenant", some_tokens(8, seed))
    await eventually(lambda: state_of(operator).sessions == 0)
    (cache,) = operator.registry
    return cache


async def test_flush_removes_a_namespace_everywhere_and_nothing_else(directory: Path, valkey: Valkey) -> None:
    config = small_config(directory, device_pages=16, host_pages=32, redis=valkey.url)
    async with running(config) as operator, await attach(directory) as session:
        for seed in range(1, 5):
            for namespace in ("tenant", "tenant-2"):
                await store(session, namespace, some_tokens(8, seed))
        places = {
            (name, seed): await where(directory, name, seed) for name in ("tenant", "tenant-2") for seed in range(1, 5)
        }
        ours = [place for (name, _), place in places.items() if name == "tenant"]
        assert all(place.total == ALL for place in places.values())
        assert any(p.device for p in ours) and any(p.host for p in ours) and any(p.redis for p in ours)
        in_redis = {name: len(valkey.client.keys(f"kvtier:1:{name}:*")) for name in ("tenant", "tenant-2")}
        host_before = only_cache(operator).host.free_pages

        flushed = await ask(directory, lambda client: client.flush_namespace("tenant"))
        assert flushed.device_pages * PAGE_SIZE == sum(p.device for p in ours)
        assert flushed.host_pages == only_cache(operator).host.free_pages - host_before
        assert (flushed.redis_pages, flushed.kept_pages) == (in_redis["tenant"], 0)
        for (name, seed), place in places.items():
            assert await where(directory, name, seed) == (TokensByTier(0, 0, 0) if name == "tenant" else place)
        assert len(valkey.client.keys("*")) == in_redis["tenant-2"]
        assert (await ask(directory, lambda client: client.flush_namespace("tenant"))).redis_pages == 0


async def test_flush_keeps_and_counts_what_a_lease_holds(directory: Path, valkey: Valkey) -> None:
    config = small_config(directory, device_pages=16, host_pages=16, redis=valkey.url, write_policy="write_through")
    async with running(config) as operator, await attach(directory) as session:
        await store(session, "tenant", PROMPT)
        await eventually(lambda: only_cache(operator).device.held_pages == 0)
        assert valkey.client.dbsize() == 8
        lease = await session.acquire("tenant", PROMPT[: 3 * PAGE_SIZE])
        flushed = await ask(directory, lambda client: client.flush_namespace("tenant"))
        assert (flushed.device_pages, flushed.redis_pages, flushed.kept_pages) == (5, 8, 3)
        assert await where(directory, "tenant") == TokensByTier(3 * PAGE_SIZE, 0, 0)
        await lease.release()
        # What was kept is known not to be in Redis: under pressure it is written there again, not lost.
        await press(session, 6)
        assert await where(directory, "tenant") == TokensByTier(0, 0, 3 * PAGE_SIZE)
        flushed = await ask(directory, lambda client: client.flush_namespace("tenant"))
        assert (flushed.device_pages, flushed.redis_pages, flushed.kept_pages) == (0, 3, 0)


async def test_flush_finds_a_cache_that_is_being_closed(directory: Path, valkey: Valkey) -> None:
    config = small_config(directory, device_pages=256, redis=valkey.url, redis_timeout_s=30.0, drain_s=30.0)
    async with running(config) as operator:
        cache = await idle_cache(directory, operator)
        valkey.pause()
        attaching = asyncio.create_task(attach(directory, other_identity(model="other-model")))
        await eventually(lambda: cache.num_held(Tier.DEVICE) > 0)  # the first pages are on their way to Redis
        flushing = asyncio.create_task(operator.flush("tenant"))
        await asyncio.sleep(0)
        valkey.resume()
        flushed = await flushing
        async with await attaching:
            assert valkey.client.dbsize() == 0
        assert flushed.device + flushed.redis >= 24 * 8
        assert flushed.kept == 0


async def test_a_pin_keeps_pages_under_pressure_until_it_is_removed(directory: Path) -> None:
    config = small_config(directory, device_pages=32, host_pages=16)
    async with running(config) as operator, await attach(directory) as session:
        await store(session, "tenant", PROMPT)
        pinned = await ask(directory, lambda client: client.pin(KNOWN, "tenant", PROMPT, ttl_s=3600))
        assert pinned.pinned_tokens == ALL
        await press(session, 8)
        assert await where(directory, "tenant") == TokensByTier(ALL, 0, 0)
        cache = only_cache(operator)
        assert (cache.pins, cache.leases, cache.device.held_pages) == (1, 0, 8)
        await ask(directory, lambda client: client.unpin(pinned.pin_id))
        with pytest.raises(PinUnknownError, match="was removed, has run out, or never was"):
            await ask(directory, lambda client: client.unpin(pinned.pin_id))
        await press(session, 8)
        assert await where(directory, "tenant") == TokensByTier(0, 0, 0)


async def test_a_pin_runs_out(directory: Path) -> None:
    async with running(small_config(directory)) as operator, await attach(directory) as session:
        await store(session, "tenant", PROMPT)
        pinned = await ask(directory, lambda client: client.pin(KNOWN, "tenant", PROMPT, ttl_s=1))
        assert only_cache(operator).pins == 1
        await eventually(lambda: only_cache(operator).pins == 0)
        assert only_cache(operator).device.held_pages == 0
        with pytest.raises(PinUnknownError):
            await ask(directory, lambda client: client.unpin(pinned.pin_id))


async def test_at_most_half_of_the_device_can_be_pinned(directory: Path) -> None:
    async with running(small_config(directory, device_pages=32)) as operator, await attach(directory) as session:
        for seed in (1, 2, 3):
            await store(session, "tenant", some_tokens(8, seed))
        for seed in (1, 2):
            await ask(directory, lambda client, seed=seed: client.pin(KNOWN, "tenant", some_tokens(8, seed), ttl_s=60))
        before = state_of(operator)
        with pytest.raises(CacheFullError, match=r"8 more pages .* over half of the 32 .*\(16 are pinned\); unpin"):
            await ask(directory, lambda client: client.pin(KNOWN, "tenant", some_tokens(8, 3), ttl_s=60))
        assert state_of(operator) == before
        assert only_cache(operator).pins == 2


async def test_statistics_tell_what_is_there(directory: Path) -> None:
    config = small_config(directory, device_pages=32, host_pages=16)
    async with running(config), await attach(directory) as session:
        await store(session, "tenant", PROMPT)
        lease = await session.acquire("tenant", PROMPT[: 2 * PAGE_SIZE], reserve_pages=3)
        statistics = await ask(directory, lambda client: client.statistics())
        assert (statistics.epoch, statistics.version) == (session.epoch, kvtier.__version__)
        assert (statistics.sessions, statistics.draining, statistics.redis.configured) == (1, False, False)
        assert statistics.uptime_seconds > 0
        (cache,) = statistics.caches
        assert (cache.fingerprint, cache.identity.model, cache.page_bytes) == (KNOWN, "test-model", PAGE_BYTES)
        assert (cache.device.pages, cache.device.free_pages, cache.device.held_pages) == (32, 32 - 8 - 3, 2 + 3)
        assert (cache.host.pages, cache.host.free_pages, cache.host.held_pages) == (16, 16, 0)
        assert (cache.tree_pages, cache.tree_nodes, cache.leases, cache.pins) == (8, 2, 1, 0)
        assert cache.tokens_asked == ALL + 2 * PAGE_SIZE
        assert cache.tokens_found.device == 2 * PAGE_SIZE
        await lease.release()


async def test_drain_writes_to_redis_and_refuses_new_work(directory: Path, valkey: Valkey) -> None:
    config = small_config(directory, device_pages=16, host_pages=16, redis=valkey.url)
    async with running(config), await attach(directory) as session:
        for seed in (1, 2, 3):
            await store(session, "tenant", some_tokens(8, seed))
        drained = await ask(directory, lambda client: client.drain(10))
        assert (drained.stored_pages, drained.unstored_pages) == (24, 0)
        assert valkey.client.dbsize() == 24
        with pytest.raises(DrainingError, match="prefetch from its successor"):
            await ask(directory, lambda client: client.prefetch(KNOWN, "tenant", PROMPT))
        with pytest.raises(DrainingError):
            await session.acquire("tenant", PROMPT)
        assert (await ask(directory, lambda client: client.statistics())).draining
        assert (await where(directory, "tenant")).total == ALL  # lookups go on


class SlowToSpill(SharedMemoryDevicePool):
    """Copies pages down when it may."""

    began, may = threading.Event(), threading.Event()

    def read_pages(self, slots: SlotArray, host: HostPool, host_slots: SlotArray) -> None:
        self.began.set()
        assert self.may.wait(20)
        super().read_pages(slots, host, host_slots)


async def test_a_drain_whose_caller_goes_leaves_no_copy_half_done(
    directory: Path, valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedMemoryDevice, "open_pool", lambda _, *arguments: SlowToSpill(*arguments))
    SlowToSpill.began.clear()
    SlowToSpill.may.clear()
    async with running(small_config(directory, redis=valkey.url)) as operator, await attach(directory) as session:
        await store(session, "tenant", PROMPT)
        async with grpc.aio.insecure_channel(f"unix:{directory}/kvtier.sock") as channel:
            call = admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest(timeout_seconds=20))
            ending = asyncio.ensure_future(call)
            assert await asyncio.to_thread(SlowToSpill.began.wait, 20)
            call.cancel()
            await asyncio.wait([ending])
        await ask(directory, lambda client: client.statistics())  # the daemon knows by then
        SlowToSpill.may.set()
        await eventually(lambda: valkey.client.dbsize() == 8)
        await eventually(lambda: only_cache(operator).device.held_pages == only_cache(operator).host.held_pages == 0)
        state_of(operator)


async def test_drain_writes_pages_that_were_split_off_or_committed_meanwhile(directory: Path, valkey: Valkey) -> None:
    config = small_config(directory, redis=valkey.url, redis_timeout_s=30.0)
    async with running(config) as operator, await attach(directory) as session:
        await store(session, "tenant", PROMPT)
        await store(session, "tenant", some_tokens(8, seed=2))
        lease = await session.acquire("tenant", b"", reserve_pages=5)
        (cache,) = operator.registry
        valkey.pause()
        draining = asyncio.create_task(operator.drain(20))
        await eventually(lambda: cache.num_held(Tier.HOST) > 0)  # the newest prompt is on its way
        await lease.commit(np.concatenate([PROMPT[: 4 * PAGE_SIZE], some_tokens(1, seed=3)]), lease.reserved_pages)
        assert cache.index.tree.num_nodes == 4
        valkey.resume()
        assert await draining == (17, 0)
        assert valkey.client.dbsize() == 17
        await lease.release()


async def test_drain_without_an_answer_from_redis_ends_in_time_and_says_what_is_missing(
    directory: Path, valkey: Valkey
) -> None:
    config = small_config(directory, redis=valkey.url, redis_timeout_s=0.3, drain_s=0.1)
    async with running(config), await attach(directory) as session:
        for seed in (1, 2, 3):
            await store(session, "tenant", some_tokens(8, seed))
        valkey.pause()
        drained = await ask(directory, lambda client: client.drain(1))
        assert (drained.stored_pages, drained.unstored_pages) == (0, 24)
        valkey.resume()


async def test_health_and_reflection_list_the_services(directory: Path, valkey: Valkey) -> None:
    async with running(small_config(directory, redis=valkey.url)):
        services = ["kvtier.v1.CacheService", "kvtier.v1.AdminService"]
        for name in ("", *services, "kvtier.redis"):
            async with asyncio.timeout(10):
                while not await ask(directory, lambda client, name=name: client.is_serving(name)):
                    await asyncio.sleep(0.01)
        with pytest.raises(DaemonError, match="NOT_FOUND"):
            await ask(directory, lambda client: client.is_serving("kvtier.nothing"))
        async with grpc.aio.insecure_channel(f"unix:{directory}/kvtier.sock") as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            requests = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol="kvtier.v1.CacheService"),
            ]
            listed, described = [response async for response in stub.ServerReflectionInfo(iter(requests))]
        assert {service.name for service in listed.list_services_response.service} == {
            *services,
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        assert b"kvtier/v1/cache.proto" in described.file_descriptor_response.file_descriptor_proto[0]


async def test_a_new_model_takes_the_place_of_an_idle_one_whose_pages_go_to_redis(
    directory: Path, valkey: Valkey
) -> None:
    other = other_identity(model="other-model")
    async with running(small_config(directory, redis=valkey.url)) as operator:
        async with await attach(directory) as session:
            await store(session, "tenant", PROMPT)
            with pytest.raises(CacheFullError, match="larger --max-caches"):
                await attach(directory, other)
        await eventually(lambda: state_of(operator).sessions == 0)
        async with await attach(directory, other) as session:
            assert [cache.identity.model for cache in state_of(operator).caches] == ["other-model"]
            assert valkey.client.dbsize() == 8
            await store(session, "tenant", PROMPT)
        await eventually(lambda: state_of(operator).sessions == 0)
        async with await attach(directory) as session:
            lease = await session.acquire("tenant", PROMPT, wait_s=10)
            assert lease.matched_tokens == TokensByTier(0, 0, ALL)


async def test_a_prefetch_into_a_cache_that_is_closed_meanwhile_is_refused(directory: Path, valkey: Valkey) -> None:
    config = small_config(directory, redis=valkey.url, redis_timeout_s=30.0)
    async with running(config) as operator:
        async with await attach(directory) as session:
            await store(session, "tenant", PROMPT)
        await eventually(lambda: state_of(operator).sessions == 0)
        (cache,) = operator.registry
        await cache.drain(10)
        await cache.flush("tenant")  # not in Redis, which alone knows what to prefetch
        valkey.pause()
        prefetching = asyncio.create_task(cache.prefetch(Prompt("tenant", PROMPT.astype("<u4").tobytes())))
        await asyncio.sleep(0)
        async with await attach(directory, other_identity(model="other-model")):
            valkey.resume()
            with pytest.raises(CacheUnknownError, match="closed in the meantime"):
                await prefetching


async def test_a_drain_of_a_cache_that_is_closed_meanwhile_says_what_is_missing(
    directory: Path, valkey: Valkey
) -> None:
    config = small_config(directory, device_pages=256, redis=valkey.url, redis_timeout_s=30.0, drain_s=0.1)
    async with running(config) as operator:
        cache = await idle_cache(directory, operator)
        valkey.pause()
        draining = asyncio.create_task(cache.drain(30))
        await eventually(lambda: cache.num_held(Tier.HOST) > 0)
        attaching = asyncio.create_task(attach(directory, other_identity(model="other-model")))
        await asyncio.sleep(0.2)  # the cache is to be closed by now, and waits for the batch under way
        valkey.resume()
        async with await attaching:
            drained = await draining
            assert drained.stored_pages + drained.unstored_pages == 24 * 8
            assert drained.stored_pages == valkey.client.dbsize() > 0


async def test_a_pinned_cache_is_not_idle(directory: Path) -> None:
    other = other_identity(model="other-model")
    async with running(small_config(directory)) as operator:
        async with await attach(directory) as session:
            await store(session, "tenant", PROMPT)
        pin = await ask(directory, lambda client: client.pin(KNOWN, "tenant", PROMPT, ttl_s=600))
        await eventually(lambda: state_of(operator).sessions == 0)
        with pytest.raises(CacheFullError, match="remove their pins"):
            await attach(directory, other)
        await ask(directory, lambda client: client.unpin(pin.pin_id))
        async with await attach(directory, other):
            assert [cache.identity.model for cache in state_of(operator).caches] == ["other-model"]


async def test_the_memory_of_a_closed_cache_is_given_back_before_the_next_is_taken(directory: Path) -> None:
    def host_pools() -> set[str]:
        """Those of this process that have no name any more."""
        maps = Path("/proc/self/maps").read_text().splitlines()
        return {line for line in maps if "/dev/shm/kvtier-" in line and line.endswith("-host (deleted)")}

    of_other_tests = host_pools()

    async with running(small_config(directory)) as operator:
        for number in range(3):
            await eventually(lambda: state_of(operator).sessions == 0)
            async with await attach(directory, other_identity(model=f"model-{number}")) as session:
                await store(session, "tenant", PROMPT)
                assert host_pools() <= of_other_tests
