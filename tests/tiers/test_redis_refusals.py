"""The Redis tier when Redis refuses. It answers, so the breaker stays closed, and the message says what to do."""

from __future__ import annotations

import asyncio

import pytest
from redis_health import assert_works, until_open
from redis_pages import NAMESPACE, memory, page

from kvtier.errors import RedisUnavailableError
from kvtier.tiers.breaker import BreakerState


async def test_a_user_without_rights_is_told_so(valkey, open_tier):
    valkey.client.acl_setuser(
        "reader", enabled=True, passwords=["+pw"], keys=["kvtier:*"], commands=["+get", "+exists"]
    )
    tier = open_tier(valkey.url.replace("unix://", "unix://reader:pw@"))
    name, image = page(1)
    assert await tier.get(NAMESPACE, name, memory()) is False
    for _ in range(5):
        with pytest.raises(RedisUnavailableError, match="NoPermission.*grant"):
            await tier.put(NAMESPACE, name, image)
    assert tier.breaker.state is BreakerState.CLOSED


async def test_the_documented_rights_are_enough(valkey, open_tier):
    commands = ["+get", "+set", "+exists", "+scan", "+unlink", "+ping", "+eval", "+strlen"]
    valkey.client.acl_setuser("cache", enabled=True, passwords=["+pw"], keys=["kvtier:*"], commands=commands)
    tier = open_tier(valkey.url.replace("unix://", "unix://cache:pw@"))
    await tier.ping()
    await assert_works(tier)
    assert await tier.flush_namespace(NAMESPACE) == 1


async def test_a_replica_refuses_writes_and_serves_reads(valkey, open_tier):
    tier = open_tier(valkey.url)
    name, image = page(1)
    await tier.put(NAMESPACE, name, image)
    valkey.client.replicaof("127.0.0.1", 1)
    for _ in range(5):
        with pytest.raises(RedisUnavailableError, match="it is a replica"):
            await tier.put(NAMESPACE, name, image)
    assert await tier.get(NAMESPACE, name, memory())
    assert tier.breaker.state is BreakerState.CLOSED


async def test_a_redis_that_asks_for_a_password_opens_the_breaker(valkey, open_tier):
    valkey.client.config_set("requirepass", "pw")
    tier = open_tier(valkey.url)
    await until_open(tier)
    assert "check user and password" in tier.breaker.last_error
    right = open_tier(f"{valkey.url}?password=pw")
    await assert_works(right)


async def test_probe_sees_redis_go_and_come_while_nobody_calls(valkey, open_tier):
    tier = open_tier(valkey.url)
    probe = asyncio.create_task(tier.probe(interval_s=0.02))
    async with asyncio.timeout(60):
        valkey.stop()
        while tier.breaker.state is not BreakerState.OPEN:
            await asyncio.sleep(0.01)
        valkey.start()
        while tier.breaker.state is not BreakerState.CLOSED:
            await asyncio.sleep(0.01)
    probe.cancel()
