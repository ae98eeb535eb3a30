"""Whether a Redis tier works, and waiting until its breaker says so."""

from __future__ import annotations

import asyncio

import pytest
from redis_pages import NAMESPACE, memory, page

from kvtier.errors import RedisUnavailableError
from kvtier.tiers.breaker import BreakerState
from kvtier.tiers.redis import RedisTier


async def until_closed(tier: RedisTier) -> None:
    """Probes until the breaker is closed, as the daemon does."""
    probe = asyncio.create_task(tier.probe(interval_s=0.02))
    async with asyncio.timeout(60):
        while tier.breaker.state is not BreakerState.CLOSED:
            await asyncio.sleep(0.01)
    probe.cancel()


async def until_open(tier: RedisTier) -> None:
    async with asyncio.timeout(60):
        while tier.breaker.state is not BreakerState.OPEN:
            with pytest.raises(RedisUnavailableError):
                await tier.ping()


async def assert_works(tier: RedisTier, seed: int = 77) -> None:
    name, image = page(seed)
    await tier.put(NAMESPACE, name, image)
    out = memory()
    assert await tier.get(NAMESPACE, name, out)
    assert out.tobytes() == image.tobytes()
    assert await tier.count_prefix(NAMESPACE, [name]) == 1
