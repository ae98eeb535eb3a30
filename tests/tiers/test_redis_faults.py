"""The Redis tier when Redis stalls, restarts, lies, refuses or is not there. Every wait here is bounded by the tier."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import traceback
from contextlib import suppress

import pytest
import redis
from redis_pages import NAMESPACE, memory, page
from redis_servers import scripted_redis, serving, wait_until

from kvtier.errors import ConfigurationError, RedisFullError, RedisUnavailableError
from kvtier.pages.envelope import PageName, encode_header
from kvtier.tiers.breaker import BreakerState
from kvtier.tiers.redis import RedisTier, page_key

LARGE = 16 << 20  # more than the buffers of a socket take


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


# Stalls.


async def test_a_stalled_redis_costs_a_call_its_deadline_and_no_more(valkey, open_tier):
    tier = open_tier(valkey.url, timeout_s=0.2, num_connections=2)
    name, image = page(1, LARGE)
    await tier.put(NAMESPACE, name, image)
    valkey.pause()
    async with asyncio.timeout(30):
        for call in (
            tier.get(NAMESPACE, name, memory(LARGE)),
            tier.put(NAMESPACE, *page(2, LARGE)),
            tier.count_prefix(NAMESPACE, [name]),
        ):
            with pytest.raises(RedisUnavailableError, match=r"did not answer within 0\.2 s"):
                await call
        assert tier.breaker.state is BreakerState.OPEN
        with pytest.raises(RedisUnavailableError, match="not asked"):
            await tier.get(NAMESPACE, name, memory(LARGE))
    valkey.resume()
    await until_closed(tier)
    await assert_works(tier)
    out = memory(LARGE)
    assert await tier.get(NAMESPACE, name, out)
    assert out.tobytes() == image.tobytes()


async def test_calls_that_queue_behind_a_stall_end_as_well(valkey, open_tier):
    tier = open_tier(valkey.url, timeout_s=0.2, num_connections=2, max_in_flight_bytes=25_000)
    await assert_works(tier)
    valkey.pause()
    async with asyncio.timeout(30):
        outcomes = await asyncio.gather(
            *(tier.put(NAMESPACE, *page(seed)) for seed in range(200)), return_exceptions=True
        )
    assert {type(outcome) for outcome in outcomes} == {RedisUnavailableError}


async def test_a_stall_in_the_middle_of_transfers_loses_no_step(valkey, open_tier):
    tier = open_tier(valkey.url, timeout_s=0.3, num_connections=2)
    pages = [page(seed, 4 << 20) for seed in range(4)]
    for name, image in pages:
        await tier.put(NAMESPACE, name, image)

    async def read_over_and_over(name: PageName, image: memoryview) -> None:
        while not (stalled.is_set() and tier.breaker.state is BreakerState.OPEN):
            out = memory(4 << 20)
            with suppress(RedisUnavailableError):
                assert await tier.get(NAMESPACE, name, out)
                assert out.tobytes() == image.tobytes()
                under_way.set()

    under_way, stalled = asyncio.Event(), asyncio.Event()
    readers = [asyncio.create_task(read_over_and_over(name, image)) for name, image in pages]
    async with asyncio.timeout(30):
        await under_way.wait()
        valkey.pause()
        stalled.set()
        await asyncio.gather(*readers)
    valkey.resume()
    await until_closed(tier)
    for name, image in pages:
        out = memory(4 << 20)
        assert await tier.get(NAMESPACE, name, out)
        assert out.tobytes() == image.tobytes()


async def test_a_reply_of_one_byte_at_a_time_ends_at_the_deadline(open_tier, tmp_path):
    async def drip(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        for byte in b"$10200\r\n" + bytes(10_202):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.05)

    async with scripted_redis(tmp_path / "socket", drip) as url, asyncio.timeout(30):
        tier = open_tier(url, timeout_s=0.3)
        with pytest.raises(RedisUnavailableError, match=r"did not answer within 0\.3 s"):
            await tier.get(NAMESPACE, page(1)[0], memory())
        with pytest.raises(RedisUnavailableError, match=r"did not answer within 0\.3 s"):
            await tier.count_prefix(NAMESPACE, [page(1)[0]])


async def test_a_page_that_is_taken_drop_by_drop_ends_at_the_deadline(open_tier, tmp_path):
    async def sip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"+OK\r\n+OK\r\n")  # to what a client asks on connecting
        while await reader.read(1000):
            await asyncio.sleep(0.05)

    async with serving(tmp_path / "socket", sip) as url, asyncio.timeout(30):
        with pytest.raises(RedisUnavailableError, match=r"did not answer within 0\.3 s"):
            await open_tier(url, timeout_s=0.3).put(NAMESPACE, *page(1, LARGE))


@pytest.mark.parametrize("ending", ["timeout", "cancel"])
async def test_the_memory_of_a_call_that_ended_is_never_written_again(open_tier, tmp_path, ending):
    name, image = page(1, 1_000_000)
    value = encode_header(name, image) + image
    half_sent, go_on, all_sent = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def send_the_second_half_too_late(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        writer.write(b"$%d\r\n%b" % (len(value), value[:500_000]))
        await writer.drain()
        half_sent.set()
        await go_on.wait()
        writer.write(value[500_000:] + b"\r\n")
        all_sent.set()

    async with scripted_redis(tmp_path / "socket", send_the_second_half_too_late) as url, asyncio.timeout(30):
        tier = open_tier(url, timeout_s=0.3)
        out = memory(1_000_000)
        call = asyncio.create_task(tier.get(NAMESPACE, name, out))
        await half_sent.wait()
        if ending == "cancel":
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        else:
            with pytest.raises(RedisUnavailableError):
                await call
        out[:] = bytes(1_000_000)
        go_on.set()
        await all_sent.wait()
        await asyncio.sleep(0.2)
        assert out == bytes(1_000_000)


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


async def test_a_string_in_reply_to_a_put_does_not_touch_the_page(open_tier, tmp_path):
    async def answer(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        writer.write(b"$10100\r\n" + bytes(10_100) + b"\r\n")

    name, image = page(1)
    source = memoryview(bytearray(image))
    async with scripted_redis(tmp_path / "socket", answer) as url:
        with pytest.raises(RedisUnavailableError, match="something else than OK"):
            await open_tier(url).put(NAMESPACE, name, source)
    assert source == image


# Refusals: Redis answers, so the breaker stays closed, and the message says what to do.


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
