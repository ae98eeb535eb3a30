"""Fixtures for the tests of tiers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from kvtier.tiers.redis import RedisTier

OpenTier = Callable[..., RedisTier]


@pytest.fixture
async def open_tier() -> AsyncIterator[OpenTier]:
    """Opens Redis tiers, which are closed when the test ends."""
    tiers: list[RedisTier] = []

    def open_one(url: str, **settings: object) -> RedisTier:
        tiers.append(RedisTier.open(url, **settings))  # type: ignore[arg-type]
        return tiers[-1]

    yield open_one
    for tier in tiers:
        await tier.close()
