"""The Redis tier when Redis restarts, lies, breaks off or is not there, and when the tier is closed."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import traceback

import pytest
import redis
from redis_health import assert_works, until_closed
from redis_pages import LARGE, NAMESPACE, memory, page
from redis_servers import scripted_redis, wait_until

from kvtier.errors import ConfigurationError, RedisFullError, RedisUnavailableError
from kvtier.pages.envelope import PageName, encode_header
from kvtier.tiers.breaker import BreakerState
from kvtier.tiers.redis import RedisTier, page_key

# The faults that were seen in another cache, one test each.


async def test_fault_1_a_key_evicted_between_exists_and_get_is_a_miss(valkey, open_tier):
    tier = open_tier(valkey.url, num_connections=1)
    name, image = page(1)
    await tier.put(NAMESPACE, name, image)
    assert await tier.count_prefix(NAMESPACE, [name]) == 1
    valkey.client.delete(page_key(NAMESPACE, name))
    assert not await tier.get(NAMESPACE, name, memory())
    await assert_works(tier)


async def test_fault_2_an_out_of_memory_reply_leaves_the_connection_in_step(valkey, open_tier):
    tier = open_tier(valkey.url, num_connections=1)
    await assert_works(tier, 0)
    connections = {client["id"] for client in valkey.client.client_list()}
    valkey.client.config_set("maxmemory", "1")
    for seed in range(1, 20):
        with pytest.raises(RedisFullError):
            await tier.put(NAMESPACE, *page(seed))
        assert await tier.get(NAMESPACE, page(0)[0], memory())
    valkey.client.config_set("maxmemory", "0")
    for seed in range(20, 40):
        await assert_works(tier, seed)
    assert {client["id"] for client in valkey.client.client_list()} >= connections, "a connection was replaced"
    stored = await tier.count_prefix(NAMESPACE, [page(seed)[0] for seed in range(1, 20)])
    assert stored == 0, "a write that was refused has landed"


async def test_fault_3_writes_go_on_after_a_restart(valkey, open_tier):
    tier = open_tier(valkey.url)
    for _ in range(3):
        await assert_works(tier)
        valkey.stop()
        valkey.start()
        # Not even the first call fails: a stale connection is replaced by a fresh one.
        await assert_works(tier)
    assert tier.breaker.state is BreakerState.CLOSED


async def test_fault_4_a_redis_that_is_down_at_the_start_fails_calls_and_comes_back_by_itself(valkey, open_tier):
    valkey.stop()
    tier = open_tier(valkey.url)
    name, image = page(1)
    for _ in range(3):
        with pytest.raises(RedisUnavailableError, match="valkey.sock"):
            await tier.count_prefix(NAMESPACE, [name])
    assert tier.breaker.state is BreakerState.OPEN
    assert "valkey.sock" in tier.breaker.last_error
    with pytest.raises(RedisUnavailableError, match="not asked"):
        await tier.put(NAMESPACE, name, image)
    valkey.start()
    await until_closed(tier)
    await assert_works(tier)


async def test_fault_6_close_ends_while_calls_are_under_way(valkey, open_tier):
    tier = open_tier(valkey.url, timeout_s=30.0, num_connections=2)
    await assert_works(tier)
    valkey.pause()
    calls = [asyncio.create_task(tier.get(NAMESPACE, page(seed)[0], memory())) for seed in range(20)]
    calls += [asyncio.create_task(tier.put(NAMESPACE, *page(seed, LARGE))) for seed in range(2)]
    calls.append(asyncio.create_task(tier.ping()))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(20):
        await tier.close()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, RedisUnavailableError) for outcome in outcomes)
    with pytest.raises(RedisUnavailableError, match="closed"):
        await tier.ping()
    await tier.close()
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("kvtier-redis")])


async def test_fault_6_close_ends_at_whatever_moment_it_comes(valkey, open_tier):
    """Threads that connect, send, are about to wait or wait: none may wait on a socket that is no longer its own."""
    rng = random.Random(6)
    small, large = page(0), page(1, LARGE)
    for _ in range(150):
        tier = open_tier(valkey.url, timeout_s=30.0, num_connections=2)
        await tier.put(NAMESPACE, *small)
        valkey.pause()
        calls = [tier.get(NAMESPACE, small[0], memory()), tier.put(NAMESPACE, *large), tier.ping()]
        tasks = [asyncio.create_task(call) for call in rng.sample(calls, len(calls))]
        await asyncio.sleep(rng.random() * 0.01)
        async with asyncio.timeout(20):
            await tier.close()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, RedisUnavailableError) for outcome in outcomes)
        valkey.resume()


SECRET = "tr0ub4dor&3"


async def test_fault_7_no_message_shows_a_password(valkey, open_tier, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)

    async def repeat_the_arguments(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        text = " ".join(f"'{arg.decode()}'" for arg in command[1:])
        writer.write(f"-ERR unknown command '{command[0].decode()}', with args beginning with: {text}\r\n".encode())

    said = []
    async with scripted_redis(tmp_path / "socket", repeat_the_arguments) as url:
        for with_secret in (url.replace("unix://", "unix://user:tr0ub4dor%263@"), f"{url}?password=tr0ub4dor%263"):
            tier = open_tier(with_secret)
            with pytest.raises(RedisUnavailableError) as raised:
                await tier.ping()
            said += [*traceback.format_exception(raised.value), repr(raised.value), tier.breaker.last_error]
    valkey.client.config_set("requirepass", "another")
    tier = open_tier(f"{valkey.url}?password=tr0ub4dor%263")
    with pytest.raises(RedisUnavailableError, match="check user and password") as raised:
        await tier.ping()
    said += [*traceback.format_exception(raised.value), tier.breaker.last_error, repr(vars(tier._caller))]
    valkey.client.close()
    for bad_url in (
        "redis://user:tr0ub4dor&3@host:port",
        "rediss://:tr0ub4dor&3@h?ssl_ca_certs=/none",
        "x://:tr0ub4dor&3@h",
    ):
        with pytest.raises(ConfigurationError) as refused:
            RedisTier.open(bad_url)
        said += traceback.format_exception_only(refused.value)
    for text in [*said, caplog.text]:
        assert SECRET not in text
        assert "tr0ub4dor%263" not in text


# Broken connections and lies.


async def test_connections_that_are_cut_under_load_never_mix_up_replies(valkey, open_tier):
    tier = open_tier(valkey.url, num_connections=3)
    pages = [page(seed, 100_000) for seed in range(8)]
    for name, image in pages:
        await tier.put(NAMESPACE, name, image)
    outcomes = {"right": 0, "failed": 0}

    async def work(name: PageName, image: memoryview) -> None:
        for turn in range(60):
            out = memory(100_000)
            try:
                if turn % 3 == 0:
                    await tier.put(NAMESPACE, name, image)
                else:
                    assert await tier.get(NAMESPACE, name, out)
                    assert out.tobytes() == image.tobytes()
                outcomes["right"] += 1
            except RedisUnavailableError:
                outcomes["failed"] += 1

    async def cut() -> None:
        with redis.Redis(unix_socket_path=str(valkey.socket_path), protocol=2) as killer:
            while True:
                killer.client_kill_filter(_type="normal", skipme=True)
                await asyncio.sleep(0.003)

    cutter = asyncio.create_task(cut())
    await asyncio.gather(*(work(name, image) for name, image in pages))
    cutter.cancel()
    assert outcomes["right"] > 0
    await until_closed(tier)
    await assert_works(tier)


async def test_a_connection_that_breaks_during_a_call_is_replaced_once(open_tier, tmp_path):
    name, image = page(1)
    value = encode_header(name, image) + image
    num_calls = 0

    async def break_off_every_other_time(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 2:
            writer.write(b"$%d\r\n%b" % (len(value), value[:5000]))
            writer.close()
        else:
            writer.write(b"$%d\r\n%b\r\n" % (len(value), value))

    async with scripted_redis(tmp_path / "socket", break_off_every_other_time) as url:
        tier = open_tier(url, num_connections=1)
        for _ in range(3):
            out = memory()
            assert await tier.get(NAMESPACE, name, out)
            assert out.tobytes() == image.tobytes()
    assert num_calls == 6


@pytest.mark.parametrize(
    "reply",
    [b"!what?\r\n", b"\r\n", b"$ten\r\n", b"$4\r\nlonger\r\n", b"+OK", b"\n", b":12x\r\n", b"*1\r\n$99999999999\r\n"],
)
async def test_what_is_not_redis_is_an_error_not_a_page(open_tier, tmp_path, reply):
    async def answer(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        writer.write(reply)
        writer.close()

    async with scripted_redis(tmp_path / "socket", answer) as url, asyncio.timeout(30):
        tier = open_tier(url)
        with pytest.raises(RedisUnavailableError):
            await tier.count_prefix(NAMESPACE, [page(1)[0]])
        with pytest.raises(RedisUnavailableError):
            await tier.put(NAMESPACE, *page(1))


async def test_what_the_client_library_cannot_read_is_a_failure_like_any_other(open_tier, tmp_path):
    async def answer(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        writer.write(b":5\r\n")  # to SCAN: redis-py unpacks it and raises TypeError

    async with scripted_redis(tmp_path / "socket", answer) as url:
        tier = open_tier(url)
        for _ in range(3):
            with pytest.raises(RedisUnavailableError, match="TypeError"):
                await tier.flush_namespace(NAMESPACE)
        assert "TypeError" in tier.breaker.last_error


async def test_a_string_in_reply_to_a_put_does_not_touch_the_page(open_tier, tmp_path):
    async def answer(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        writer.write(b"$10100\r\n" + bytes(10_100) + b"\r\n")

    name, image = page(1)
    source = memoryview(bytearray(image))
    async with scripted_redis(tmp_path / "socket", answer) as url:
        with pytest.raises(RedisUnavailableError, match="something else than OK"):
            await open_tier(url).put(NAMESPACE, name, source)
    assert source == image
