"""Pages on their way down under pressure and up again: their bytes are right, found and left tokens told truly."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from serving import (
    PAGE_SIZE,
    Valkey,
    assert_true_pages,
    attach,
    eventually,
    only_cache,
    small_config,
    some_tokens,
    state_of,
    store,
)

from kvtier.client import AsyncLease, AsyncSession, Client, TokensByTier
from kvtier.daemon.server import running

NUM_PAGES = 8
ALL = NUM_PAGES * PAGE_SIZE
PROMPTS = [some_tokens(NUM_PAGES, seed) for seed in range(6)]  # 48 pages
POLICIES = ("write_back", "write_through", "write_through_selective")


async def acquire(session: AsyncSession, prompt: int, wait_s: float = 10.0, **options: float) -> AsyncLease:
    lease = await session.acquire("tenant", PROMPTS[prompt], wait_s=wait_s, **options)
    assert_true_pages(session, lease, "tenant", PROMPTS[prompt])
    return lease


async def find(session: AsyncSession, prompt: int, wait_s: float = 10.0, **options: float) -> TokensByTier:
    """Where a prompt was found; checks its bytes and gives it back."""
    lease = await acquire(session, prompt, wait_s, **options)
    await lease.release()
    return lease.matched_tokens


async def only_in_redis(session: AsyncSession, directory: Path, prompt: int) -> None:
    """Writes a prompt, and others until it is in Redis alone."""
    await store(session, "tenant", PROMPTS[prompt])
    for seed in range(100, 200):
        await store(session, "tenant", some_tokens(NUM_PAGES, seed))
        where = await asyncio.to_thread(look_up, directory, session, prompt)
        if where == TokensByTier(0, 0, ALL):
            return
    raise AssertionError(f"the prompt stayed in {where}")


def look_up(directory: Path, session: AsyncSession, prompt: int) -> TokensByTier:
    with Client(f"unix:{directory}/kvtier.sock") as client:
        return client.lookup(session.identity.fingerprint, "tenant", PROMPTS[prompt])


@pytest.mark.parametrize("policy", POLICIES)
async def test_pages_come_back_as_they_were_from_every_tier(policy: str, directory: Path, valkey: Valkey) -> None:
    config = small_config(directory, device_pages=16, host_pages=16, redis=valkey.url, write_policy=policy)
    async with running(config) as operator, await attach(directory) as session:
        for prompt in PROMPTS:
            await store(session, "tenant", prompt)
        found = TokensByTier(0, 0, 0)
        random = np.random.default_rng(11)
        for prompt in (*range(6), *random.permutation(6), *random.permutation(6)):
            here = await find(session, prompt)
            assert here.total == ALL, f"prompt {prompt} lost pages"
            found = TokensByTier(*(a + b for a, b in zip(found, here, strict=True)))
        assert found.redis >= 2 * ALL
        assert found.host > 0
        await eventually(lambda: only_cache(operator).device.held_pages == only_cache(operator).host.held_pages == 0)
        (cache,) = state_of(operator).caches
        assert cache.tokens_asked == (6 + 18) * ALL
        totals = cache.tokens_found
        assert TokensByTier(totals.device, totals.host, totals.redis) == found


async def test_a_host_pool_smaller_than_the_device_pool_loses_nothing(directory: Path, valkey: Valkey) -> None:
    config = small_config(directory, device_pages=48, host_pages=16, redis=valkey.url)
    async with running(config) as operator, await attach(directory) as session:
        for prompt in PROMPTS:
            await store(session, "tenant", prompt)
        lease = await session.acquire("tenant", b"", reserve_pages=48)  # everything has to leave the device at once
        assert state_of(operator).caches[0].tree_pages == 16
        assert valkey.client.dbsize() == 32
        await lease.release()
        for prompt in range(6):
            assert (await find(session, prompt)).total == ALL


async def test_without_redis_what_host_memory_cannot_take_is_dropped(directory: Path) -> None:
    config = small_config(directory, device_pages=16, host_pages=16)
    async with running(config) as operator, await attach(directory) as session:
        for prompt in PROMPTS:
            await store(session, "tenant", prompt)
        assert only_cache(operator).tree_pages == 32
        assert [(await find(session, prompt, wait_s=0)).total for prompt in range(2)] == [0, 0]
        assert await find(session, 5) == TokensByTier(ALL, 0, 0)
        assert await find(session, 3) == TokensByTier(0, ALL, 0)


async def test_what_is_known_below_the_device_is_left_there_without_a_wait(directory: Path) -> None:
    async with running(small_config(directory, device_pages=16)), await attach(directory) as session:
        for prompt in (0, 1, 2):
            await store(session, "tenant", PROMPTS[prompt])
        lease = await acquire(session, 0, wait_s=0.0)
        assert (lease.matched_tokens, lease.left_tokens) == (TokensByTier(0, 0, 0), TokensByTier(0, ALL, 0))
        lease = await acquire(session, 0)
        assert (lease.matched_tokens, lease.left_tokens) == (TokensByTier(0, ALL, 0), TokensByTier(0, 0, 0))


async def test_an_acquire_returns_by_its_wait_and_what_comes_later_is_there_the_next_time(
    directory: Path, valkey: Valkey
) -> None:
    config = small_config(directory, device_pages=16, host_pages=16, redis=valkey.url, redis_timeout_s=30)
    async with running(config) as operator, await attach(directory) as session:
        await only_in_redis(session, directory, 0)
        valkey.pause()
        lease = await acquire(session, 0, wait_s=0.1)
        assert lease.matched_tokens.total == 0
        await lease.release()
        valkey.resume()
        await eventually(lambda: only_cache(operator).leases == 0)
        async with asyncio.timeout(20):
            while await find(session, 0, wait_s=0.0) != TokensByTier(ALL, 0, 0):
                await asyncio.sleep(0.01)
        await eventually(lambda: only_cache(operator).device.held_pages == 0)


async def test_pages_that_others_commit_during_the_wait_are_matched_and_counted(
    directory: Path, valkey: Valkey
) -> None:
    config = small_config(directory, redis=valkey.url, redis_timeout_s=30)
    async with running(config) as operator, await attach(directory) as waiting, await attach(directory) as other:
        valkey.pause()
        acquiring = asyncio.create_task(acquire(waiting, 0))
        await eventually(lambda: len(operator.registry.get(waiting.identity.fingerprint).index.leases) >= 2)
        await store(other, "tenant", PROMPTS[0])
        valkey.resume()
        lease = await acquiring
        assert (lease.matched_pages.size, lease.matched_tokens) == (NUM_PAGES, TokensByTier(ALL, 0, 0))


async def test_what_is_slower_to_move_than_to_compute_is_left_where_it_is(directory: Path, valkey: Valkey) -> None:
    config = small_config(directory, device_pages=16, host_pages=16, redis=valkey.url)
    async with running(config), await attach(directory) as session:
        await only_in_redis(session, directory, 0)
        assert await find(session, 0) == TokensByTier(0, 0, ALL)  # all routes have been measured now
        await only_in_redis(session, directory, 1)
        lease = await acquire(session, 1, prefill_tokens_per_second=1e15)
        assert (lease.matched_tokens, lease.left_tokens) == (TokensByTier(0, 0, 0), TokensByTier(0, 0, ALL))
        await lease.release()
        lease = await acquire(session, 1, prefill_tokens_per_second=1e-3)
        assert (lease.matched_tokens, lease.left_tokens) == (TokensByTier(0, 0, ALL), TokensByTier(0, 0, 0))
        await lease.release()
        for prompt in (2, 3):
            await store(session, "tenant", PROMPTS[prompt])  # moves the others to host memory
        lease = await acquire(session, 1, prefill_tokens_per_second=1e15)
        assert (lease.matched_tokens, lease.left_tokens) == (TokensByTier(0, 0, 0), TokensByTier(0, ALL, 0))


async def test_acquires_of_the_same_cold_prefix_fetch_each_page_once(directory: Path, valkey: Valkey) -> None:
    config = small_config(directory, device_pages=16, host_pages=16, redis=valkey.url)
    async with running(config) as operator, await attach(directory) as one, await attach(directory) as two:
        await only_in_redis(one, directory, 0)
        valkey.client.config_resetstat()
        leases = await asyncio.gather(*(acquire(session, 0) for session in [one, two] * 10))
        # Those that came later may have found the first batches in host memory.
        assert leases[0].matched_tokens == TokensByTier(0, 0, ALL)
        assert {lease.matched_tokens.total for lease in leases} == {ALL}
        pages = {tuple(lease.matched_pages.tolist()) for lease in leases}
        assert len(pages) == 1
        assert valkey.client.info("commandstats")["cmdstat_get"]["calls"] == NUM_PAGES
        for lease in leases:
            await lease.release()
        await eventually(lambda: only_cache(operator).device.held_pages == 0)


async def test_prefetch_brings_a_prefix_to_the_device(directory: Path, valkey: Valkey) -> None:
    config = small_config(directory, device_pages=16, host_pages=16, redis=valkey.url)
    async with running(config) as operator, await attach(directory) as session:
        await only_in_redis(session, directory, 0)

        def prefetch() -> int:
            with Client(f"unix:{directory}/kvtier.sock") as client:
                return client.prefetch(session.identity.fingerprint, "tenant", PROMPTS[0])

        assert await asyncio.to_thread(prefetch) == ALL
        async with asyncio.timeout(20):
            while await find(session, 0, wait_s=0.0) != TokensByTier(ALL, 0, 0):
                await asyncio.sleep(0.01)
        assert await asyncio.to_thread(prefetch) == 0
        await eventually(lambda: only_cache(operator).device.held_pages == 0)


async def test_a_prompt_may_go_on_behind_a_parent_lease_through_all_tiers(directory: Path, valkey: Valkey) -> None:
    config = small_config(directory, device_pages=16, host_pages=16, redis=valkey.url)
    async with running(config) as operator, await attach(directory) as session:
        await only_in_redis(session, directory, 0)
        half = ALL // 2
        parent = await session.acquire("tenant", PROMPTS[0][:half], wait_s=10)
        assert parent.matched_tokens == TokensByTier(0, 0, half)
        child = await session.acquire("tenant", PROMPTS[0][half:], parent=parent, wait_s=10)
        assert child.matched_tokens == TokensByTier(0, 0, half)
        await parent.release()
        pages = [*parent.matched_pages.tolist(), *child.matched_pages.tolist()]
        whole = await acquire(session, 0, wait_s=0)
        assert whole.matched_pages.tolist() == pages
        # The child holds its parent's pages too.
        assert only_cache(operator).device.held_pages == NUM_PAGES
        await whole.release()
        assert only_cache(operator).device.held_pages == NUM_PAGES
        await child.release()
        assert only_cache(operator).device.held_pages == 0


@pytest.mark.parametrize(("after_hits", "hits_to_write"), [(1, 1), (3, 3)])
async def test_the_selective_policy_writes_after_so_many_hits(
    after_hits: int, hits_to_write: int, directory: Path, valkey: Valkey
) -> None:
    config = small_config(
        directory, redis=valkey.url, write_policy="write_through_selective", write_after_hits=after_hits
    )
    async with running(config), await attach(directory) as session:
        await store(session, "tenant", PROMPTS[0])
        for _ in range(hits_to_write - 1):
            await find(session, 0)
        assert valkey.client.dbsize() == 0
        await find(session, 0)
        await eventually(lambda: valkey.client.dbsize() == NUM_PAGES)


async def test_write_through_writes_on_commit_and_each_page_once(directory: Path, valkey: Valkey) -> None:
    config = small_config(directory, redis=valkey.url, write_policy="write_through")
    async with running(config) as operator, await attach(directory) as session:
        valkey.client.config_resetstat()
        await store(session, "tenant", PROMPTS[0])
        await eventually(lambda: valkey.client.dbsize() == NUM_PAGES)
        for _ in range(5):
            await find(session, 0)
        await eventually(lambda: only_cache(operator).device.held_pages == 0)
        assert valkey.client.info("commandstats")["cmdstat_set"]["calls"] == NUM_PAGES


async def test_what_redis_has_dropped_is_written_again_when_it_leaves_host_memory(
    directory: Path, valkey: Valkey
) -> None:
    config = small_config(directory, device_pages=16, host_pages=16, redis=valkey.url, write_policy="write_through")
    async with running(config) as operator, await attach(directory) as session:
        await store(session, "tenant", PROMPTS[0])
        await eventually(lambda: valkey.client.dbsize() == NUM_PAGES)
        await eventually(lambda: only_cache(operator).device.held_pages == 0)
        valkey.client.flushall()
        await only_in_redis(session, directory, 0)
        assert await find(session, 0) == TokensByTier(0, 0, ALL)


async def test_a_prompt_longer_than_the_write_queue_is_written_through_in_the_end(
    directory: Path, valkey: Valkey
) -> None:
    config = small_config(directory, redis=valkey.url, write_policy="write_through")
    tokens = some_tokens(60, seed=50)  # of 64 pages on the device, 32 may wait to be written
    async with running(config), await attach(directory) as session:
        await store(session, "tenant", tokens)
        async with asyncio.timeout(20):
            while valkey.client.dbsize() < 60:
                await (await session.acquire("tenant", tokens)).release()
                await asyncio.sleep(0.01)
