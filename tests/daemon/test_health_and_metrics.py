"""Health and metrics tell the truth, whatever Redis does; scraped over HTTP, asked over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import (
    IDENTITY,
    PAGE_BYTES,
    PAGE_SIZE,
    RawSession,
    Valkey,
    attach,
    eventually,
    only_cache,
    small_config,
    some_tokens,
    store,
)

from kvtier.client import AsyncSession, Client, TokensByTier
from kvtier.daemon.operator import Operator
from kvtier.daemon.server import running
from kvtier.errors import CacheFullError, RedisUnavailableError
from kvtier.pages.chain import chain_keys, root_key
from kvtier.pages.envelope import PageName
from kvtier.tiers.redis import page_key
from kvtier.v1 import cache_pb2 as pb

PROMPTS = [some_tokens(8, seed) for seed in range(6)]  # 48 pages, on pools of 16
ALL = PROMPTS[0].size
ROUTES = ("device_to_host", "host_to_device", "host_to_redis", "redis_to_host")


class Watch:
    """What can be seen of a daemon from outside."""

    def __init__(self, directory: Path, port: int) -> None:
        self._address = f"unix:{directory}/kvtier.sock"
        self._url = f"http://127.0.0.1:{port}/metrics"

    async def metrics(self) -> dict[str, float]:
        """Samples by name and labels, for example `pages{state=free,tier=host}`, without the prefix `kvtier_`."""

        def scrape() -> str:
            with urllib.request.urlopen(self._url, timeout=10) as response:
                return str(response.read(), "utf-8")

        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(await asyncio.to_thread(scrape)):
            for name, labels, value, *_ in family.samples:
                kept = sorted((k, v) for k, v in labels.items() if k not in ("cache", "model"))
                label_text = "{" + ",".join(f"{k}={v}" for k, v in kept) + "}" if kept else ""
                samples[name.removeprefix("kvtier_") + label_text] = value
        return samples

    async def is_serving(self, service: str = "") -> bool:
        def ask() -> bool:
            with Client(self._address) as client:
                return client.is_serving(service)

        return await asyncio.to_thread(ask)

    async def until(self, is_serving: bool, service: str) -> None:
        """Returns when the health of a service is as given."""
        async with asyncio.timeout(20):
            while await self.is_serving(service) is not is_serving:
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def watched(directory: Path, **settings: Any) -> AsyncIterator[tuple[Operator, Watch]]:
    """A daemon with a metrics endpoint, on small pools."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"device_pages": 16, "host_pages": 16, "metrics": f"127.0.0.1:{port}", "redis_timeout_s": 0.3} | settings
    async with running(small_config(directory, **settings)) as operator:
        yield operator, Watch(directory, port)


async def find(session: AsyncSession, prompt: int, wait_s: float = 10.0) -> TokensByTier:
    lease = await session.acquire("tenant", PROMPTS[prompt], wait_s=wait_s)
    await lease.release()
    return lease.matched_tokens


async def find_below(session: AsyncSession) -> None:
    """Stores all prompts, and finds the first in lower tiers, Redis among them."""
    for prompt in PROMPTS:
        await store(session, "tenant", prompt)
    found = await find(session, 0)
    assert found.total == ALL
    assert found.redis > 0


def plus(a: TokensByTier, b: TokensByTier) -> TokensByTier:
    return TokensByTier(*(x + y for x, y in zip(a, b, strict=True)))


async def breaker_of(watch: Watch) -> str:
    metrics = await watch.metrics()
    states = [state for state in ("closed", "open", "half_open") if metrics[f"redis_breaker{{state={state}}}"] == 1]
    assert len(states) == 1
    return states[0]


async def test_figures_equal_what_a_scripted_load_must_give(directory: Path, valkey: Valkey) -> None:
    async with (
        watched(directory, redis=valkey.url, redis_timeout_s=5) as (_, watch),
        await attach(directory) as session,
    ):
        found, left = TokensByTier(0, 0, 0), TokensByTier(0, 0, 0)
        for prompt in (0, 1, 2, 3, 4, 5, 5, 0, 4, 3, 1, 2):
            if prompt == 5:
                lease = await session.acquire("tenant", PROMPTS[2])  # leaves what is below the device
                assert lease.left_tokens.host + lease.left_tokens.redis <= ALL
                left = plus(left, lease.left_tokens)
                await lease.release()
            lease = await store(session, "tenant", PROMPTS[prompt], wait_s=10)
            found, left = plus(found, lease.matched_tokens), plus(left, lease.left_tokens)
        assert found.total == 6 * ALL
        assert found.redis > 0 and found.host > 0 and found.device > 0 and left.total > 0
        with pytest.raises(CacheFullError):
            await session.acquire("tenant", b"", reserve_pages=17)
        held = await session.acquire("tenant", PROMPTS[2], reserve_pages=3)
        found = plus(found, held.matched_tokens)
        twin = await session.acquire("tenant", b"", reserve_pages=1)
        assert (await twin.commit(PROMPTS[2][:PAGE_SIZE], twin.reserved_pages)).duplicate_pages == 1

        metrics = await watch.metrics()
        assert metrics["tokens_asked_total"] == 15 * ALL
        for tier, in_tier, left_there in zip(("device", "host", "redis"), found, left, strict=True):
            assert metrics[f"tokens_found_total{{tier={tier}}}"] == in_tier
            assert metrics[f"tokens_left_total{{tier={tier}}}"] == left_there
        assert metrics["committed_pages_total{outcome=new}"] == 48
        assert metrics["committed_pages_total{outcome=duplicate}"] == 1
        moved = {route: metrics[f"transfer_pages_total{{outcome=moved,route={route}}}"] for route in ROUTES}
        assert moved["redis_to_host"] * PAGE_SIZE == found.redis
        assert moved["host_to_device"] * PAGE_SIZE == found.host + found.redis
        assert moved["host_to_redis"] == valkey.client.dbsize()
        for route in ROUTES:
            assert metrics[f"transfer_bytes_total{{route={route}}}"] == moved[route] * PAGE_BYTES
            assert metrics[f"transfer_seconds_total{{route={route}}}"] > 0
        assert metrics["evictions_total{outcome=dropped,tier=device}"] == 0
        assert metrics["evictions_total{outcome=dropped,tier=host}"] == 0
        assert metrics["rpc_errors_total{method=acquire,status=RESOURCE_EXHAUSTED}"] == 1
        assert metrics["rpc_seconds_count{method=acquire}"] == 18  # one of them to warm up
        assert metrics["sessions"] == 1
        assert metrics["leases"] == 2
        # 8 matched and 3 reserved by the one; the duplicate of the other, whose original the first holds as well.
        assert metrics["pages{state=held,tier=device}"] == 12
        for tier in ("device", "host"):
            assert sum(metrics[f"pages{{state={state},tier={tier}}}"] for state in ("free", "held", "evictable")) == 16
        assert metrics["page_bytes"] == PAGE_BYTES
        assert await breaker_of(watch) == "closed"
        await held.release()
        await twin.release()
        metrics = await watch.metrics()
        assert (metrics["leases"], metrics["pages{state=held,tier=device}"]) == (0, 0)


async def test_pages_that_wait_to_be_written_are_not_queued_again_by_every_hit(directory: Path, valkey: Valkey) -> None:
    settings = {"redis": valkey.url, "redis_timeout_s": 30, "write_policy": "write_through", "device_pages": 32}
    async with watched(directory, **settings) as (operator, watch), await attach(directory) as session:
        valkey.pause()
        await store(session, "tenant", PROMPTS[0])
        for _ in range(5):
            assert await find(session, 0) == TokensByTier(ALL, 0, 0)
        metrics = await watch.metrics()
        assert (metrics["pages{state=held,tier=device}"], metrics["writes_skipped_total"]) == (8, 0)
        await store(session, "tenant", some_tokens(10, seed=70))  # of 32 pages 16 may wait
        assert (await watch.metrics())["writes_skipped_total"] == 2
        valkey.resume()
        await eventually(lambda: valkey.client.dbsize() == 16)
        await eventually(lambda: only_cache(operator).device.held_pages == 0)
        assert (await watch.metrics())["transfer_pages_total{outcome=moved,route=device_to_host}"] == 16


async def use_without_redis(session: AsyncSession, watch: Watch) -> None:
    """Commits and finds pages, drops pages: what goes on working when Redis does not."""
    for prompt in PROMPTS:
        await store(session, "tenant", prompt)
    for seed in (50, 51, 52):
        await store(session, "tenant", some_tokens(8, seed))
    assert await find(session, 0) == TokensByTier(0, 0, 0)
    assert (await store(session, "tenant", some_tokens(8, 52))).matched_tokens == TokensByTier(ALL, 0, 0)
    assert await watch.is_serving("")
    assert await watch.is_serving("kvtier.v1.CacheService")


async def test_redis_that_is_down_at_the_start_and_comes_up_later(directory: Path, valkey: Valkey) -> None:
    valkey.stop()
    async with watched(directory, redis=valkey.url) as (operator, watch), await attach(directory) as session:
        await use_without_redis(session, watch)
        await watch.until(False, "kvtier.redis")
        assert await breaker_of(watch) in ("open", "half_open")
        metrics = await watch.metrics()
        assert metrics["transfer_pages_total{outcome=failed,route=host_to_redis}"] > 0
        assert "transfer_pages_total{outcome=moved,route=host_to_redis}" not in metrics
        dropped = metrics["evictions_total{outcome=dropped,tier=host}"]
        assert dropped == metrics["transfer_pages_total{outcome=failed,route=host_to_redis}"]
        assert "valkey.sock" in operator.statistics().redis.last_error
        with pytest.raises(RedisUnavailableError):
            await operator.flush("tenant")
        valkey.start()
        await watch.until(True, "kvtier.redis")
        assert await breaker_of(watch) == "closed"
        await find_below(session)


@pytest.mark.parametrize("fault", ["dies", "stalls"])
async def test_redis_that_fails_under_load_and_comes_back(fault: str, directory: Path, valkey: Valkey) -> None:
    async with watched(directory, redis=valkey.url) as (_, watch), await attach(directory) as session:
        await watch.until(True, "kvtier.redis")
        (valkey.stop if fault == "dies" else valkey.pause)()
        await use_without_redis(session, watch)
        await watch.until(False, "kvtier.redis")
        assert await breaker_of(watch) in ("open", "half_open")
        assert (await watch.metrics())["transfer_pages_total{outcome=failed,route=host_to_redis}"] > 0
        (valkey.start if fault == "dies" else valkey.resume)()
        await watch.until(True, "kvtier.redis")
        await find_below(session)


async def test_redis_that_is_full_answers_but_takes_nothing(
    directory: Path, start_valkey: Callable[..., Valkey]
) -> None:
    valkey = start_valkey(maxmemory="1mb", maxmemory_policy="noeviction")
    async with watched(directory, redis=valkey.url) as (_, watch), await attach(directory) as session:
        await use_without_redis(session, watch)
        metrics = await watch.metrics()
        full = metrics["transfer_pages_total{outcome=full,route=host_to_redis}"]
        assert full == metrics["evictions_total{outcome=dropped,tier=host}"] > 0
        assert "transfer_pages_total{outcome=moved,route=host_to_redis}" not in metrics
        # It answers, so that what it has can be read: the breaker stays closed.
        assert await breaker_of(watch) == "closed"
        valkey.client.config_set("maxmemory", 0)
        await find_below(session)


def flipped(value: bytes) -> bytes:
    return value[:-5] + bytes([value[-5] ^ 1]) + value[-4:]


def of_another_version(value: bytes) -> bytes:
    unpacker = msgpack.Unpacker()
    unpacker.feed(value)
    header = unpacker.unpack()
    return bytes(msgpack.packb(header | {"version": 2})) + value[unpacker.tell() :]


@pytest.mark.parametrize(
    "spoil", [flipped, lambda value: value[:-1], lambda value: value[:40], lambda _: b"", of_another_version],
    ids=["a flipped bit", "a byte short", "40 bytes", "empty", "another version"],
)  # fmt: skip
async def test_a_spoilt_value_is_a_counted_miss_and_computed_again(
    spoil: Callable[[bytes], bytes], directory: Path, valkey: Valkey
) -> None:
    async with (
        watched(directory, redis=valkey.url, redis_timeout_s=5) as (_, watch),
        await attach(directory) as session,
    ):
        for prompt in PROMPTS:
            await store(session, "tenant", prompt)
        keys = chain_keys(root_key(IDENTITY.fingerprint, "tenant"), PROMPTS[0].astype("<u4").tobytes(), PAGE_SIZE, {})
        name = page_key("tenant", PageName(IDENTITY.fingerprint, keys[5], 0))
        value = valkey.client.get(name)
        valkey.client.set(name, spoil(value))
        lease = await session.acquire("tenant", PROMPTS[0], wait_s=10)
        assert lease.matched_tokens == TokensByTier(0, 0, 5 * PAGE_SIZE)
        assert lease.left_tokens == TokensByTier(0, 0, 3 * PAGE_SIZE)
        await lease.release()
        metrics = await watch.metrics()
        assert metrics["transfer_pages_total{outcome=corrupt,route=redis_to_host}"] >= 1
        assert valkey.client.exists(name) == 0
        assert await watch.is_serving("kvtier.redis")
        await store(session, "tenant", PROMPTS[0])  # checks that the pages found are true, and writes the others
        assert await find(session, 0) == TokensByTier(ALL, 0, 0)


async def test_a_loop_that_dies_is_started_again_counted_and_seen_in_health(directory: Path) -> None:
    starts = 0

    async def dies_twice() -> None:
        nonlocal starts
        starts += 1
        if starts <= 2:
            raise OSError("a fault that nobody foresaw")
        await asyncio.Event().wait()

    async with watched(directory) as (operator, watch):
        assert await watch.is_serving("")
        operator.registry._supervisor.start("dies-twice", dies_twice)
        await watch.until(False, "")
        assert not await watch.is_serving("kvtier.v1.CacheService")
        await eventually(lambda: starts == 3)
        await watch.until(True, "")
        assert (await watch.metrics())["loop_restarts_total{loop=dies-twice}"] == 2


async def test_a_session_that_breaks_off_with_leases_is_counted(directory: Path) -> None:
    async with watched(directory) as (operator, watch):
        async with RawSession(directory) as session:
            await session.attach()
            await session.acquire("tenant", reserve_pages=1)
        async with RawSession(directory) as session:
            await session.attach()
            lease = await session.acquire("tenant", reserve_pages=1)
            await session.ask(release=pb.ReleaseRequest(lease_ids=[lease.lease_id]))
        await eventually(lambda: operator.statistics().sessions == 0)
        assert (await watch.metrics())["sessions_lost_total"] == 1
