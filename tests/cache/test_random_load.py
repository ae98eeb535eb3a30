"""Many workers on tiny pools, some cancelled or broken off, with a Redis that stalls now and again.

Every page that a lease matches holds the bytes that follow from its chain of tokens, as long as the lease lives. When
all is over, nothing is held, and the index is sound.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path

import numpy as np
import pytest
from serving import (
    IDENTITY,
    PAGE_SIZE,
    Tokens,
    Valkey,
    assert_true_pages,
    attach,
    eventually,
    small_config,
    some_tokens,
    state_of,
    true_images,
)

from kvtier.client import AsyncSession
from kvtier.daemon.operator import Operator
from kvtier.daemon.server import running
from kvtier.errors import CacheFullError, RedisUnavailableError
from kvtier.tiers.base import Tier

NUM_TURNS = 400
NUM_WORKERS = 8
STEMS = [some_tokens(6, seed) for seed in range(4)]


class Load:
    """What the workers of one daemon do, decided by a seed."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self.random = np.random.default_rng(seed)
        self.num_turns = self.num_matched = 0

    def prompt(self) -> Tokens:
        """One of a few stems cut somewhere, and one of a few ends behind it."""
        stem = STEMS[self.random.integers(len(STEMS))][: PAGE_SIZE * self.random.integers(1, 7)]
        end = some_tokens(int(self.random.integers(1, 4)), seed=100 + int(self.random.integers(6)))
        return np.concatenate([stem, end])

    async def turn(self, session: AsyncSession) -> None:
        """Acquires a prompt, computes what is missing, commits it in one or two parts, and releases."""
        random, tokens = self.random, self.prompt()
        namespace = ("tenant-a", "tenant-b")[random.integers(2)]
        extra_keys = [(PAGE_SIZE * int(random.integers(3)), b"adapter")] if random.integers(3) == 0 else []
        lease = await session.acquire(
            namespace, tokens, extra_keys=extra_keys, wait_s=float(random.choice([0.0, 0.01, 0.2]))
        )
        try:
            assert_true_pages(session, lease, namespace, tokens, extra_keys)
            self.num_matched += lease.matched_pages.size
            missing = tokens.size // PAGE_SIZE - lease.matched_pages.size
            if missing:
                pages = await lease.extend(missing)
                images = true_images(IDENTITY, namespace, tokens, extra_keys)[-missing:]
                for part in np.array_split(np.arange(missing), int(random.integers(1, 3))):
                    lease.check()
                    session.pool.memory[pages[part]] = images[part]
                    first = tokens.size // PAGE_SIZE - missing
                    stop = (first + part[-1] + 1) * PAGE_SIZE if part.size else 0
                    if part.size:
                        await lease.commit(tokens[(first + part[0]) * PAGE_SIZE : stop], pages[part], extra_keys)
            await asyncio.sleep(float(random.choice([0.0, 0.002, 0.02])))
            lease.check()
            assert_true_pages(session, lease, namespace, tokens, extra_keys)
            self.num_turns += 1
        finally:
            await lease.release()

    async def worker(self) -> None:
        """Turns in sessions of its own; now and again one is broken off, or cancelled in the middle."""
        while True:
            session = await attach(self._directory)
            try:
                for _ in range(self.random.integers(5, 40)):
                    turn = asyncio.create_task(self.turn(session))
                    try:
                        if self.random.integers(4) == 0:
                            await asyncio.sleep(float(self.random.random() * 0.02))
                            turn.cancel()
                        await asyncio.wait({turn})
                    finally:
                        turn.cancel()
                        await asyncio.wait({turn})
                    if not turn.cancelled() and not isinstance(turn.exception(), CacheFullError):
                        turn.result()
                with contextlib.suppress(CacheFullError):  # a lease that only the end of the session ends
                    await session.acquire("tenant-a", self.prompt(), reserve_pages=2)
            finally:
                await session.close()


async def disturb(load: Load, operator: Operator, valkey: Valkey) -> None:
    """Stalls Redis, flushes a namespace."""
    while True:
        await asyncio.sleep(float(load.random.random() * 0.3))
        valkey.pause()
        await asyncio.sleep(float(load.random.random() * 0.15))
        valkey.resume()
        if load.random.integers(3) == 0:
            with contextlib.suppress(RedisUnavailableError):
                await operator.flush("tenant-b")


async def until_done(load: Load, works: list[Callable[[], Coroutine[None, None, None]]]) -> None:
    """Runs works together until the load has done its turns; whatever one of them raises is raised."""
    tasks = [asyncio.create_task(work()) for work in works]
    try:
        while load.num_turns < NUM_TURNS and not any(task.done() for task in tasks):
            await asyncio.sleep(0.01)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [error for error in ended if not isinstance(error, asyncio.CancelledError)] == []


@pytest.mark.parametrize(("policy", "seed"), [("write_back", 1), ("write_through", 2), ("write_through_selective", 3)])
async def test_no_wrong_page_and_nothing_left_held(policy: str, seed: int, directory: Path, valkey: Valkey) -> None:
    config = small_config(
        directory,
        device_pages=48,
        host_pages=32,
        redis=valkey.url,
        redis_timeout_s=0.1,
        write_policy=policy,
        grace_s=0.05,
    )
    async with running(config) as operator:
        load = Load(directory, seed)
        await until_done(load, [*[load.worker] * NUM_WORKERS, lambda: disturb(load, operator, valkey)])
        valkey.resume()
        assert load.num_turns >= NUM_TURNS
        assert load.num_matched > NUM_TURNS
        (cache,) = operator.registry
        await eventually(
            lambda: len(cache.index.leases) == cache.num_held(Tier.DEVICE) == cache.num_held(Tier.HOST) == 0
        )
        assert state_of(operator).caches[0].tree_pages > 0
