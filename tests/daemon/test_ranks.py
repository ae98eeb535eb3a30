"""Tensor-parallel ranks: one tree and one decision for all, and a pool for each in which a page has the same number."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from serving import (
    IDENTITY,
    PAGE_BYTES,
    PAGE_SIZE,
    Tokens,
    Valkey,
    attach,
    eventually,
    only_cache,
    other_identity,
    small_config,
    some_tokens,
    state_of,
    true_images,
)

from kvtier.client import AsyncLease, AsyncSession, TokensByTier
from kvtier.daemon.devices import Gpus, SharedMemoryDevice
from kvtier.daemon.server import running
from kvtier.errors import ConfigurationError, GpuError, InvalidRequestError
from kvtier.index.pool import SlotArray
from kvtier.pages.chain import chain_keys, root_key
from kvtier.pages.envelope import PageName
from kvtier.tiers.device import SharedMemoryDevicePool
from kvtier.tiers.host import HostPool
from kvtier.tiers.redis import page_key

WORLD_SIZE = 3
RANKS = [other_identity(rank=rank, world_size=WORLD_SIZE) for rank in range(WORLD_SIZE)]
NUM_PAGES = 8
PROMPTS = [some_tokens(NUM_PAGES, seed) for seed in range(6)]


class Group:
    """The sessions of all ranks. What they write is different on every rank."""

    def __init__(self, sessions: list[AsyncSession]) -> None:
        self.sessions = sessions

    async def store(self, tokens: Tokens) -> None:
        lease = await self.sessions[0].acquire("tenant", tokens, wait_s=10)
        self.check(lease, tokens)
        matched, num_pages = lease.matched_pages.size, tokens.size // PAGE_SIZE
        if matched < num_pages:
            pages = await lease.extend(num_pages - matched)
            for session in self.sessions:
                session.pool.memory[pages] = images(session, tokens)[matched:]
            await lease.commit(tokens[matched * PAGE_SIZE :], pages)
        await lease.release()

    async def find(self, tokens: Tokens) -> TokensByTier:
        lease = await self.sessions[0].acquire("tenant", tokens, wait_s=10)
        self.check(lease, tokens)
        await lease.release()
        return lease.matched_tokens

    def check(self, lease: AsyncLease, tokens: Tokens) -> None:
        """The matched pages hold, on every rank, what was written there."""
        assert lease.matched_tokens.total == lease.matched_pages.size * PAGE_SIZE
        for session in self.sessions:
            expected = images(session, tokens)[: lease.matched_pages.size]
            np.testing.assert_array_equal(session.pool.memory[lease.matched_pages], expected)


def images(session: AsyncSession, tokens: Tokens) -> np.ndarray:
    """They follow from the fingerprint of the rank, among others."""
    return true_images(session.identity, "tenant", tokens)


@contextlib.asynccontextmanager
async def group(directory: Path) -> AsyncIterator[Group]:
    async with contextlib.AsyncExitStack() as stack:
        # In whatever order they come.
        sessions = [await stack.enter_async_context(await attach(directory, RANKS[rank])) for rank in (2, 0, 1)]
        yield Group(sorted(sessions, key=lambda session: session.identity.rank))


def config_of_ranks(directory: Path, device_pages: int, host_pages: int, **settings: object):
    """So many pages for every rank."""
    return small_config(directory, WORLD_SIZE * device_pages, WORLD_SIZE * host_pages, **settings)


async def test_pages_come_back_on_every_rank_from_every_tier(directory: Path, valkey: Valkey) -> None:
    config = config_of_ranks(directory, 16, 16, redis=valkey.url)
    async with running(config) as operator, group(directory) as ranks:
        assert {session.pool.num_pages for session in ranks.sessions} == {16}
        for prompt in PROMPTS:
            await ranks.store(prompt)
        found = TokensByTier(0, 0, 0)
        random = np.random.default_rng(11)
        for prompt in (*range(6), *random.permutation(6), *random.permutation(6)):
            here = await ranks.find(PROMPTS[prompt])
            assert here.total == NUM_PAGES * PAGE_SIZE, f"prompt {prompt} lost pages"
            found = TokensByTier(*(a + b for a, b in zip(found, here, strict=True)))
        assert min(found.redis, found.host) > 0
        await eventually(lambda: only_cache(operator).device.held_pages == only_cache(operator).host.held_pages == 0)
        (cache,) = state_of(operator).caches
        assert cache.fingerprint == RANKS[0].fingerprint
        assert cache.identity.world_size == WORLD_SIZE


async def test_a_page_that_lacks_one_rank_in_redis_is_not_found(directory: Path, valkey: Valkey) -> None:
    config = config_of_ranks(directory, 16, 16, redis=valkey.url)
    async with running(config), group(directory) as ranks:
        await ranks.store(PROMPTS[0])
    assert valkey.client.delete(redis_key(PROMPTS[0], page=3, rank=1)) == 1
    async with running(config), group(directory) as ranks:
        assert await ranks.find(PROMPTS[0]) == TokensByTier(0, 0, 3 * PAGE_SIZE)
        await ranks.store(PROMPTS[0])
        assert (await ranks.find(PROMPTS[0])).total == NUM_PAGES * PAGE_SIZE


async def test_a_drain_writes_a_page_again_that_redis_has_dropped_of_one_rank(directory: Path, valkey: Valkey) -> None:
    config = config_of_ranks(directory, 16, 16, redis=valkey.url)
    async with running(config) as operator, group(directory) as ranks:
        await ranks.store(PROMPTS[0])
        assert await operator.drain(10) == (NUM_PAGES, 0)
        assert valkey.client.delete(redis_key(PROMPTS[0], page=3, rank=1)) == 1
        assert await operator.drain(10) == (NUM_PAGES, 0)
        assert valkey.client.dbsize() == WORLD_SIZE * NUM_PAGES


async def test_a_page_that_is_corrupt_on_one_rank_is_not_found(directory: Path, valkey: Valkey) -> None:
    config = config_of_ranks(directory, 16, 16, redis=valkey.url)
    async with running(config), group(directory) as ranks:
        await ranks.store(PROMPTS[0])
    valkey.client.setrange(redis_key(PROMPTS[0], page=5, rank=2), 300, b"\0\1\2\3")
    async with running(config), group(directory) as ranks:
        assert await ranks.find(PROMPTS[0]) == TokensByTier(0, 0, 5 * PAGE_SIZE)


def redis_key(tokens: Tokens, page: int, rank: int) -> str:
    """Chain keys are those of rank 0 on all ranks."""
    keys = chain_keys(root_key(RANKS[0].fingerprint, "tenant"), tokens.astype("<u4").tobytes(), PAGE_SIZE, {})
    return page_key("tenant", PageName(RANKS[rank].fingerprint, keys[page], rank))


class FailingOnOneRank(SharedMemoryDevicePool):
    """Fails to copy pages up on rank 1."""

    broken = False

    def __init__(self, name: str, num_pages: int, page_bytes: int) -> None:
        super().__init__(name, num_pages, page_bytes)
        self._is_rank_1 = name.endswith("-1-device")

    def write_pages(self, slots: SlotArray, host: HostPool, host_slots: SlotArray) -> None:
        if self.broken and self._is_rank_1:
            raise GpuError("cuMemcpyBatchAsync failed: CUDA_ERROR_LAUNCH_FAILED")
        super().write_pages(slots, host, host_slots)


async def test_pages_that_fail_to_come_up_on_one_rank_are_missed_on_all(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FailingOnOneRank, "broken", False)
    monkeypatch.setattr(SharedMemoryDevice, "open_pool", lambda _, *arguments: FailingOnOneRank(*arguments))
    config = config_of_ranks(directory, 16, 32)
    async with running(config) as operator, group(directory) as ranks:
        for prompt in PROMPTS[:3]:
            await ranks.store(prompt)
        FailingOnOneRank.broken = True
        assert await ranks.find(PROMPTS[0]) == TokensByTier(0, 0, 0)
        FailingOnOneRank.broken = False
        assert (await ranks.find(PROMPTS[0])).host == NUM_PAGES * PAGE_SIZE
        await eventually(lambda: only_cache(operator).device.held_pages == 0)
        state_of(operator)


async def test_only_rank_0_acquires(directory: Path) -> None:
    async with running(config_of_ranks(directory, 16, 16)) as operator, group(directory) as ranks:
        with pytest.raises(InvalidRequestError, match="rank 2 asks for a lease; rank 0 acquires for all ranks"):
            await ranks.sessions[2].acquire("tenant", PROMPTS[0])
        assert only_cache(operator).leases == 0


async def test_the_memory_is_shared_by_the_ranks(directory: Path) -> None:
    config = small_config(directory, device_pages=100, host_pages=70)
    async with running(config) as operator, group(directory):
        assert (only_cache(operator).device.pages, only_cache(operator).host.pages) == (33, 23)
    too_small = small_config(directory, device_pages=45)
    async with running(too_small):
        with pytest.raises(ConfigurationError, match=f"set device_bytes to {16 * 3 * PAGE_BYTES:,} or more"):
            await attach(directory, RANKS[0])


async def test_ranks_of_another_number_are_another_model(directory: Path) -> None:
    config = config_of_ranks(directory, 32, 32, max_caches=2)
    async with running(config) as operator, group(directory), await attach(directory, IDENTITY):
        assert len(state_of(operator).caches) == 2


async def test_pools_that_are_made_anew_have_another_id(directory: Path) -> None:
    async with running(config_of_ranks(directory, 16, 16)):
        async with group(directory) as ranks:
            (first,) = {session.pool.pool_id for session in ranks.sessions}
            epoch = ranks.sessions[0].epoch
        async with await attach(directory, IDENTITY):  # the memory is for one cache
            pass
        async with group(directory) as ranks:
            (second,) = {session.pool.pool_id for session in ranks.sessions}
            assert ranks.sessions[0].epoch == epoch
    assert second != first


class FakeGpu:
    """What `Gpus` asks of a GPU: it opens no pool in these tests."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid

    def __str__(self) -> str:
        return f"A GPU ({self.uuid})"


def test_pools_lie_on_the_gpus_of_the_ranks() -> None:
    devices = Gpus([FakeGpu("GPU-a"), FakeGpu("GPU-b"), FakeGpu("GPU-c")])  # type: ignore[list-item]
    (first,) = devices.of_ranks([], 1)
    assert devices.of_ranks(["GPU-a"], 1) == [first]
    b, a = devices.of_ranks(["GPU-b", "GPU-a"], 2)
    assert a is first is not b
    with pytest.raises(InvalidRequestError, match="names 0 GPUs for 2 ranks"):
        devices.of_ranks([], 2)
    with pytest.raises(InvalidRequestError, match="names 1 GPUs for 2 ranks"):
        devices.of_ranks(["GPU-a"], 2)
    with pytest.raises(InvalidRequestError, match="names GPU-x, but this daemon's device pools lie on GPU-a, GPU-b"):
        devices.of_ranks(["GPU-x"], 1)
