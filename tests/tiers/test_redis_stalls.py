"""The Redis tier when Redis stalls: a call has its deadline, and takes no longer."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from redis_health import assert_works, until_closed
from redis_pages import LARGE, NAMESPACE, memory, page
from redis_servers import scripted_redis, serving

from kvtier.errors import RedisUnavailableError
from kvtier.pages.envelope import PageName, encode_header
from kvtier.tiers.breaker import BreakerState


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
