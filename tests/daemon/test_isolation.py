"""The same tokens under another namespace, another fingerprint or other extra keys: no hit in any tier."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from serving import (
    IDENTITY,
    PAGE_BYTES,
    PAGE_SIZE,
    Valkey,
    assert_true_pages,
    attach,
    eventually,
    only_cache,
    other_identity,
    small_config,
    some_tokens,
    store,
)

from kvtier.client import AsyncSession, Client, TokensByTier
from kvtier.daemon.server import running
from kvtier.pages.chain import chain_keys, root_key
from kvtier.pages.layout import PageFormat

TOKENS = some_tokens(4, seed=1)
NOTHING = TokensByTier(0, 0, 0)
ALL = TOKENS.size


async def found(session: AsyncSession, namespace: str, **options: Any) -> TokensByTier:
    lease = await session.acquire(namespace, TOKENS, wait_s=10, **options)
    await lease.release()
    assert lease.matched_tokens.total == lease.matched_pages.size * session.identity.layout.page_size
    return lease.matched_tokens


async def look_up(directory: Path, session: AsyncSession, namespace: str) -> TokensByTier:
    def ask() -> TokensByTier:
        with Client(f"unix:{directory}/kvtier.sock") as client:
            return client.lookup(session.identity.fingerprint, namespace, TOKENS)

    return await asyncio.to_thread(ask)


async def test_namespaces_share_nothing_in_any_tier(directory: Path, valkey: Valkey) -> None:
    config = small_config(directory, device_pages=16, host_pages=16, redis=valkey.url, write_policy="write_through")
    async with running(config) as operator, await attach(directory) as session:
        await store(session, "tenant-a", TOKENS)
        assert await found(session, "tenant-b") == NOTHING
        assert await look_up(directory, session, "tenant-b") == NOTHING
        await operator.drain(10)
        # NOTE: keys and headers are read from Redis itself.
        keys = chain_keys(root_key(IDENTITY.fingerprint, "tenant-a"), TOKENS.astype("<u4").tobytes(), PAGE_SIZE, {})
        prefix = IDENTITY.fingerprint.hex()[:16]
        expected = {f"kvtier:1:tenant-a:{prefix}:{key.hex()}:0".encode(): key for key in keys}
        assert set(valkey.client.keys("*")) == set(expected)
        for name, key in expected.items():
            unpacker = msgpack.Unpacker()
            value = valkey.client.get(name)
            unpacker.feed(value)
            header = unpacker.unpack()
            assert (header["version"], header["fingerprint"], header["key"]) == (1, IDENTITY.fingerprint, key)
            assert (header["rank"], header["image_bytes"]) == (0, PAGE_BYTES)
            assert len(value) == unpacker.tell() + PAGE_BYTES


async def test_namespaces_share_nothing_below_the_device(directory: Path, valkey: Valkey) -> None:
    config = small_config(directory, device_pages=16, host_pages=16, redis=valkey.url)
    async with running(config) as operator, await attach(directory) as session:
        await store(session, "tenant-a", TOKENS)
        where: set[TokensByTier] = set()
        for seed in range(10, 24):
            where.add(await look_up(directory, session, "tenant-a"))
            assert await found(session, "tenant-b") == NOTHING
            assert await look_up(directory, session, "tenant-b") == NOTHING
            await store(session, "tenant-a", some_tokens(4, seed))
        assert {TokensByTier(ALL, 0, 0), TokensByTier(0, ALL, 0), TokensByTier(0, 0, ALL)} <= where
        assert await found(session, "tenant-a") == TokensByTier(0, 0, ALL)
        theirs = await store(session, "tenant-b", TOKENS)
        assert theirs.matched_pages.size == 0
        a, b = [await session.acquire(name, TOKENS, wait_s=10) for name in ("tenant-a", "tenant-b")]
        assert np.intersect1d(a.matched_pages, b.matched_pages).size == 0
        assert_true_pages(session, a, "tenant-a", TOKENS)
        assert_true_pages(session, b, "tenant-b", TOKENS)
        assert only_cache(operator).device.held_pages == 8


@pytest.mark.parametrize(
    "change",
    [
        {"page_format": PageFormat.FP8},
        {"recipe": "other-scales"},
        {"page_size": 32},
        {"model": "other-model"},
        {"revision": "r2"},
        {"rope": "theta=10000"},
        {"vocab_size": 1001},
    ],
    ids=str,
)
async def test_another_fingerprint_finds_nothing_in_any_tier(
    change: dict[str, Any], directory: Path, valkey: Valkey
) -> None:
    config = small_config(
        directory, device_pages=256, host_pages=256, redis=valkey.url, write_policy="write_through", max_caches=2
    )
    async with running(config), await attach(directory) as ours:
        await store(ours, "tenant", TOKENS)
        await eventually(lambda: valkey.client.dbsize() == 4)
        async with await attach(directory, other_identity(**change)) as theirs:
            assert theirs.pool.page_bytes == theirs.identity.layout.page_bytes
            assert await found(theirs, "tenant") == NOTHING
            assert await look_up(directory, theirs, "tenant") == NOTHING
            await store(theirs, "tenant", TOKENS)
            assert (await found(theirs, "tenant")).device == ALL
        assert (await found(ours, "tenant")).device == ALL


async def test_another_fingerprint_finds_nothing_in_redis(directory: Path, valkey: Valkey) -> None:
    config = small_config(directory, redis=valkey.url)
    async with running(config), await attach(directory) as ours:
        await store(ours, "tenant", TOKENS)
    assert valkey.client.dbsize() == 4  # written on shutdown
    async with running(config), await attach(directory, other_identity(revision="r2")) as theirs:
        assert await found(theirs, "tenant") == NOTHING
    async with running(config), await attach(directory) as ours:
        assert await found(ours, "tenant") == TokensByTier(0, 0, ALL)


async def test_extra_keys_separate_from_their_page_on(directory: Path, valkey: Valkey) -> None:
    config = small_config(directory, device_pages=16, host_pages=16, redis=valkey.url)
    adapter, image = [(0, b"adapter")], [(2 * PAGE_SIZE + 3, b"image")]
    kinds: list[list[tuple[int, bytes]]] = [[], adapter, image, adapter + image, [(2 * PAGE_SIZE + 3, b"picture")]]
    async with running(config) as operator, await attach(directory) as session:
        shared = {}
        for number, extra_keys in enumerate(kinds):
            lease = await store(session, "tenant", TOKENS, extra_keys, wait_s=10)
            shared[number] = lease.matched_pages.size
        # An image in the third page leaves the two pages before it shared.
        assert shared == {0: 0, 1: 0, 2: 2, 3: 2, 4: 2}
        assert only_cache(operator).tree_pages == 4 + 4 + 2 + 2 + 2
        for seed in range(10, 20):
            await store(session, "tenant", some_tokens(8, seed))
        for extra_keys in reversed(kinds):
            lease = await session.acquire("tenant", TOKENS, extra_keys=extra_keys, wait_s=10)
            assert lease.matched_tokens.total == ALL
            assert_true_pages(session, lease, "tenant", TOKENS, extra_keys)
            await lease.release()
        assert valkey.client.dbsize() >= 14


async def test_extra_keys_of_a_continuation_count_from_the_start_of_the_sequence(directory: Path) -> None:
    half = ALL // 2
    image = [(half + 1, b"image")]
    async with running(small_config(directory)), await attach(directory) as session:
        await store(session, "tenant", TOKENS, image)
        parent = await session.acquire("tenant", TOKENS[:half], extra_keys=image)
        assert parent.matched_tokens.device == half
        with_image = await session.acquire("tenant", TOKENS[half:], parent=parent, extra_keys=image)
        assert with_image.matched_tokens.device == half
        without = await session.acquire("tenant", TOKENS[half:], parent=parent)
        assert without.matched_tokens == NOTHING
