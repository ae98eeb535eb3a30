"""Leases of workers that go away, fall silent or give up: what they held is free in time, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from serving import (
    IDENTITY,
    PAGE_SIZE,
    RawSession,
    Valkey,
    assert_true_pages,
    attach,
    eventually,
    only_cache,
    small_config,
    some_tokens,
    state_of,
    store,
    true_images,
)

from kvtier.client import AsyncLease, AsyncSession
from kvtier.daemon.server import running
from kvtier.errors import CacheFullError, DeadlineError
from kvtier.protocol import identity_to_message
from kvtier.v1 import cache_pb2 as pb

WORKER = """
import sys, time
sys.path.insert(0, {tests!r})
from serving import IDENTITY, some_tokens
from kvtier.client import connect
session = connect("unix:{directory}/kvtier.sock", IDENTITY, timeout_s=60)
lease = session.acquire("tenant", some_tokens(2, seed=1), reserve_pages=10)
session.pool.memory[lease.reserved_pages] = 255
print("holds", flush=True)
session.acquire("tenant", some_tokens(9, seed=9), wait_s=50)
"""


@contextlib.contextmanager
def worker_process(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that holds 2 matched and 10 reserved pages, and waits in another acquire if Redis lets it."""
    script = WORKER.format(tests=str(Path(__file__).parents[1]), directory=directory)
    worker = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert worker.stdout is not None
    try:
        yield worker
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()


async def acquire_when_free(session: AsyncSession, num_pages: int) -> AsyncLease:
    """A lease on pages that are not free yet."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(CacheFullError):
                return await session.acquire("tenant", b"", reserve_pages=num_pages)
            await asyncio.sleep(0.01)


async def test_a_killed_worker_gives_its_pages_back_after_the_grace_time_and_nobody_notices(
    directory: Path, valkey: Valkey
) -> None:
    # Redis hangs for much longer than the test, so that the worker dies within an acquire.
    config = small_config(directory, device_pages=32, redis=valkey.url, redis_timeout_s=60, grace_s=0.5, drain_s=0.1)
    async with running(config) as operator, await attach(directory) as other:
        await store(other, "tenant", some_tokens(2, seed=1))
        own = await other.acquire("tenant", some_tokens(2, seed=1), reserve_pages=1)
        valkey.pause()
        with worker_process(directory) as worker:
            assert await asyncio.to_thread(worker.stdout.readline) == b"holds\n"
            await eventually(lambda: only_cache(operator).leases == 3)
            dies_at = time.monotonic()
            worker.send_signal(signal.SIGKILL)
            await eventually(lambda: only_cache(operator).leases == 1)
            # Everything but the 2 + 1 pages of the other session, and the 10 that a stray kernel may still write.
            free = await other.acquire("tenant", b"", reserve_pages=19)
            quarantined = await acquire_when_free(other, 10)
            assert time.monotonic() - dies_at >= 0.5
        assert np.intersect1d(quarantined.reserved_pages, free.reserved_pages).size == 0
        own.check()
        assert_true_pages(other, own, "tenant", some_tokens(2, seed=1))
        tokens = some_tokens(3, seed=2)
        other.pool.memory[own.reserved_pages[:1]] = true_images(IDENTITY, "tenant", tokens)[:1]
        assert (await own.commit(tokens[:PAGE_SIZE], own.reserved_pages[:1])).committed_tokens == 3 * PAGE_SIZE
        valkey.resume()


async def test_matched_pages_of_a_session_that_ends_are_free_at_once_and_reserved_ones_after_the_grace_time(
    directory: Path,
) -> None:
    config = small_config(directory, device_pages=16, grace_s=0.6)
    async with running(config) as operator, await attach(directory) as keeper:
        await store(keeper, "tenant", some_tokens(4, seed=1))
        worker = await attach(directory)
        lease = await worker.acquire("tenant", some_tokens(4, seed=1), reserve_pages=5)
        assert only_cache(operator).device.held_pages == 9
        ends_at = time.monotonic()
        await worker.close()
        await eventually(lambda: only_cache(operator).leases == 0)
        assert only_cache(operator).device.held_pages == 5
        others = await keeper.acquire("tenant", b"", reserve_pages=7)
        assert np.intersect1d(others.reserved_pages, lease.reserved_pages).size == 0
        mine = await acquire_when_free(keeper, 5)
        assert time.monotonic() - ends_at >= 0.6
        assert set(mine.reserved_pages.tolist()) == set(lease.reserved_pages.tolist())
        await eventually(lambda: only_cache(operator).device.held_pages == 12)


async def test_a_silent_session_is_ended_and_one_that_beats_is_not(directory: Path) -> None:
    config = small_config(directory, lease_ttl_s=0.3, grace_s=0.2)
    async with running(config) as operator, await attach(directory) as beating, RawSession(directory) as silent:
        assert (await silent.attach()).lease_ttl_ms == 300
        lease = await beating.acquire("tenant", b"", reserve_pages=2)
        await silent.acquire("tenant", reserve_pages=3)
        assert only_cache(operator).leases == 2
        await silent.ended()
        await eventually(lambda: only_cache(operator).device.held_pages == 2)
        assert state_of(operator).sessions == 1
        lease.check()
        assert (await lease.extend(1)).size == 1


async def test_two_attach_requests_at_once_attach_once(directory: Path) -> None:
    async with running(small_config(directory, max_caches=2)) as operator, RawSession(directory) as session:
        one = pb.AttachRequest(identity=identity_to_message(IDENTITY))
        first, second = await session.ask_at_once({"attach": one}, {"attach": one})
        assert first.attach.fingerprint == IDENTITY.fingerprint
        assert second.error.kind == "NotAttachedError"
        assert state_of(operator).sessions == 1


async def test_a_cancelled_acquire_leaves_no_lease_behind(directory: Path) -> None:
    tokens = some_tokens(8, seed=3)
    random = np.random.default_rng(5)
    async with running(small_config(directory)) as operator, await attach(directory) as session:
        await store(session, "tenant", tokens)
        epoch, stays = session.epoch, await session.acquire("tenant", tokens, reserve_pages=1)
        num_cancelled = 0
        for _ in range(150):
            task = asyncio.create_task(session.acquire("tenant", tokens, reserve_pages=3))
            for _ in range(random.integers(0, 30)):
                await asyncio.sleep(0)
            task.cancel()
            try:
                await (await task).release()
            except asyncio.CancelledError:
                num_cancelled += 1
        assert num_cancelled > 30
        await eventually(lambda: only_cache(operator).leases == 1)
        assert only_cache(operator).device.held_pages == 9
        stays.check()
        assert session.epoch == epoch


async def test_an_acquire_past_its_deadline_leaves_no_lease_behind(directory: Path, valkey: Valkey) -> None:
    config = small_config(directory, device_pages=16, host_pages=16, redis=valkey.url, redis_timeout_s=1.5)
    async with running(config) as operator, await attach(directory) as session:
        for seed in range(2):
            await store(session, "tenant", some_tokens(16, seed))
        valkey.pause()
        async with await attach(directory, timeout_s=0.3) as hasty:
            with pytest.raises(DeadlineError, match="did not answer acquire within 0.3 s"):
                await hasty.acquire("tenant", b"", reserve_pages=8)  # needs room in host memory, which needs Redis
            await eventually(lambda: only_cache(operator).device.free_pages >= 8)
            valkey.resume()
            await eventually(lambda: only_cache(operator).leases == 0)
            assert state_of(operator).sessions == 2


async def test_requests_of_a_lease_are_done_in_their_order(directory: Path) -> None:
    tokens = some_tokens(6, seed=4)
    async with running(small_config(directory)) as operator, await attach(directory) as session:
        lease = await session.acquire("tenant", b"", reserve_pages=6)
        pages = lease.reserved_pages
        parts = [slice(start, start + 2) for start in (0, 2, 4)]
        done = await asyncio.gather(
            *(lease.commit(tokens[part.start * PAGE_SIZE : part.stop * PAGE_SIZE], pages[part]) for part in parts),
            lease.release(),
        )
        assert [result.committed_tokens for result in done[:3]] == [2 * PAGE_SIZE, 4 * PAGE_SIZE, 6 * PAGE_SIZE]
        cache = only_cache(operator)
        assert (cache.leases, cache.tree_pages, cache.device.held_pages) == (0, 6, 0)


async def test_an_acquire_continues_what_was_committed_before_it(directory: Path) -> None:
    """Although the commit takes longer: its many tokens are hashed in a thread."""
    history, turn = some_tokens(1100, seed=5), some_tokens(2, seed=6)
    async with running(small_config(directory, device_pages=1200)), await attach(directory) as session:
        parent = await session.acquire("tenant", history, reserve_pages=1100)
        _, child = await asyncio.gather(
            parent.commit(history, parent.reserved_pages),
            session.acquire("tenant", turn, parent=parent, reserve_pages=2),
        )
        assert (await child.commit(turn, child.reserved_pages)).committed_tokens == 1102 * PAGE_SIZE
        assert (await session.acquire("tenant", np.concatenate([history, turn]))).matched_pages.size == 1102
        assert (await session.acquire("tenant", turn)).matched_pages.size == 0


async def test_leases_of_a_worker_that_reads_no_answers_end(directory: Path) -> None:
    """More than gRPC keeps for it: the daemon cannot write the rest of its answers."""
    tokens = some_tokens(8000, seed=7)
    config = small_config(directory, device_pages=9000, lease_ttl_s=0.5, grace_s=0.5)
    async with running(config) as operator, await attach(directory) as writer, RawSession(directory) as deaf:
        await store(writer, "tenant", tokens)
        await deaf.attach()
        for _ in range(200):
            await deaf.send(acquire=pb.AcquireRequest(namespace="tenant", tokens=tokens.tobytes()))
        await eventually(lambda: only_cache(operator).leases > 0)
        await eventually(lambda: only_cache(operator).leases == 0)
        assert state_of(operator).sessions == 1
        deaf.leave()


async def test_requests_that_wait_for_each_other_are_not_taken_for_silence(directory: Path, valkey: Valkey) -> None:
    """More at a time than the daemon takes, each for longer than a session may be silent."""
    config = small_config(directory, lease_ttl_s=0.4, grace_s=0.2, redis=valkey.url, redis_timeout_s=60, drain_s=0.1)
    async with running(config) as operator, await attach(directory) as session:
        valkey.pause()
        waiting = (session.acquire("tenant", some_tokens(2, seed), wait_s=1.0) for seed in range(300))
        leases = await asyncio.gather(*waiting)
        assert [lease.matched_pages.size for lease in leases] == [0] * 300
        assert only_cache(operator).leases == 300
        valkey.resume()


async def test_drain_refuses_new_leases_and_lets_those_there_are_finish(directory: Path) -> None:
    tokens = some_tokens(2, seed=6)
    async with running(small_config(directory)) as operator, await attach(directory) as session:
        lease = await session.acquire("tenant", b"", reserve_pages=2)
        drained = await operator.drain(1.0)
        assert (drained.stored_pages, drained.unstored_pages) == (0, 0)
        with pytest.raises(Exception, match="gives no new leases") as refused:
            await session.acquire("tenant", b"")
        assert type(refused.value).__name__ == "DrainingError"
        with pytest.raises(Exception, match="draining; attach to its successor"):
            await attach(directory)
        assert (await lease.commit(tokens, lease.reserved_pages)).committed_tokens == 2 * PAGE_SIZE
        assert state_of(operator).draining
        assert (await operator.drain(1.0)).unstored_pages == 2
