"""The Redis tier on a healthy Valkey: what it stores, finds, refuses and deletes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgpack
import pytest
from redis_pages import NAMESPACE, memory, page
from redis_servers import scripted_redis

from kvtier.errors import CorruptPageError, InvalidRequestError, RedisFullError, RedisUnavailableError
from kvtier.pages.envelope import PageName, encode_header
from kvtier.tiers.breaker import BreakerState
from kvtier.tiers.redis import page_key


async def test_a_page_comes_back_as_it_was_put(valkey, open_tier):
    tier = open_tier(valkey.url)
    for seed, num_bytes in enumerate((1, 16, 65_536, 65_537, 1_000_000, 9_437_184)):
        name, image = page(seed, num_bytes)
        await tier.put(NAMESPACE, name, image)
        out = memory(num_bytes)
        assert await tier.get(NAMESPACE, name, out)
        assert out.tobytes() == image.tobytes()


async def test_the_value_is_header_and_image_under_the_documented_key(valkey, open_tier):
    name, image = page(1)
    await open_tier(valkey.url).put("a.tenant-1", name, image)
    key = f"kvtier:1:a.tenant-1:{name.fingerprint.hex()[:16]}:{name.key.hex()}:{name.rank}"
    assert valkey.client.keys() == [key.encode()]
    assert valkey.client.get(key) == encode_header(name, image) + image
    assert valkey.client.ttl(key) == -1


async def test_pages_expire_when_a_ttl_is_given(valkey, open_tier):
    name, image = page(1)
    await open_tier(valkey.url, ttl_s=1000).put(NAMESPACE, name, image)
    assert 990 < valkey.client.ttl(page_key(NAMESPACE, name)) <= 1000


async def test_a_page_is_found_only_under_its_own_name_and_namespace(valkey, open_tier):
    tier = open_tier(valkey.url)
    name, image = page(1)
    await tier.put(NAMESPACE, name, image)
    others = [
        name._replace(fingerprint=bytes(32)),
        name._replace(key=bytes(32)),
        name._replace(rank=name.rank + 1),
    ]
    for other in others:
        assert not await tier.get(NAMESPACE, other, memory())
    assert not await tier.get("other", name, memory())
    with pytest.raises(InvalidRequestError, match="namespace"):
        await tier.get("", name, memory())


async def test_many_calls_at_once_keep_their_pages_apart(valkey, open_tier):
    tier = open_tier(valkey.url, num_connections=3, max_in_flight_bytes=400_000)
    pages = [page(seed, 50_000 + seed) for seed in range(100)]

    async def there_and_back(name: PageName, image: memoryview) -> bool:
        await tier.put(NAMESPACE, name, image)
        out = memory(len(image))
        return await tier.get(NAMESPACE, name, out) and out.tobytes() == image.tobytes()

    assert all(await asyncio.gather(*(there_and_back(name, image) for name, image in pages)))
    num_clients = len(valkey.client.client_list())
    assert num_clients <= 1 + 3, "more connections than asked for"


async def test_count_prefix_stops_at_the_first_page_that_is_missing(valkey, open_tier):
    tier = open_tier(valkey.url)
    pages = [page(seed, 10) for seed in range(700)]
    names = [name for name, _ in pages]
    assert await tier.count_prefix(NAMESPACE, []) == 0
    assert await tier.count_prefix(NAMESPACE, names) == 0
    await asyncio.gather(*(tier.put(NAMESPACE, name, image) for name, image in pages))
    assert await tier.count_prefix(NAMESPACE, names) == 700
    for missing in (699, 512, 511, 256, 255, 1, 0):
        valkey.client.delete(page_key(NAMESPACE, names[missing]))
        assert await tier.count_prefix(NAMESPACE, names) == missing
    exist = await tier.which_exist(NAMESPACE, names)
    assert [index for index, exists in enumerate(exist) if not exists] == [0, 1, 255, 256, 511, 512, 699]


async def test_flush_deletes_one_namespace_and_nothing_else(valkey, open_tier):
    tier = open_tier(valkey.url)
    namespaces = ("a", "a.b", "a-b", "A", "aa", "b", "a.")
    pages = [page(seed, 10) for seed in range(1200)]
    for namespace in namespaces:
        await asyncio.gather(*(tier.put(namespace, name, image) for name, image in pages[:5]))
    await asyncio.gather(*(tier.put("a", name, image) for name, image in pages))
    valkey.client.set("another", "application")
    assert await tier.flush_namespace("a") == 1200
    assert not valkey.client.keys("kvtier:1:a:*")
    for namespace in namespaces[1:]:
        assert await tier.count_prefix(namespace, [name for name, _ in pages[:5]]) == 5
    assert valkey.client.get("another") == b"application"
    assert await tier.flush_namespace("a") == 0


def _changed_bit(value: bytearray, name: PageName, image: memoryview) -> None:
    value[-5] ^= 1


def _truncated(value: bytearray, name: PageName, image: memoryview) -> None:
    del value[-1:]


def _cut_below_the_image(value: bytearray, name: PageName, image: memoryview) -> None:
    del value[50:]


def _empty(value: bytearray, name: PageName, image: memoryview) -> None:
    value.clear()


def _too_long(value: bytearray, name: PageName, image: memoryview) -> None:
    value.extend(bytes(2_000_000))


def _one_byte_too_long(value: bytearray, name: PageName, image: memoryview) -> None:
    value.append(0)


def _another_page(value: bytearray, name: PageName, image: memoryview) -> None:
    other, _ = page(99)
    value[:] = encode_header(other, image) + image


def _another_rank(value: bytearray, name: PageName, image: memoryview) -> None:
    value[:] = encode_header(name._replace(rank=name.rank + 1), image) + image


def _another_version(value: bytearray, name: PageName, image: memoryview) -> None:
    header = msgpack.unpackb(encode_header(name, image))
    value[:] = msgpack.packb(header | {"version": 2}) + bytes(image)


def _no_header(value: bytearray, name: PageName, image: memoryview) -> None:
    value[:100] = bytes(100)


@pytest.mark.parametrize(
    "spoil",
    [
        _changed_bit,
        _truncated,
        _cut_below_the_image,
        _empty,
        _too_long,
        _one_byte_too_long,
        _another_page,
        _another_rank,
        _another_version,
        _no_header,
    ],
)
async def test_a_value_that_is_not_its_page_is_reported_and_deleted(
    valkey, open_tier, spoil: Callable[[bytearray, PageName, memoryview], None]
):
    tier = open_tier(valkey.url, num_connections=1)
    name, image = page(1)
    value = bytearray(encode_header(name, image) + image)
    spoil(value, name, image)
    valkey.client.set(page_key(NAMESPACE, name), bytes(value))
    with pytest.raises(CorruptPageError):
        await tier.get(NAMESPACE, name, memory())
    assert valkey.client.dbsize() == 0
    assert not await tier.get(NAMESPACE, name, memory())
    await tier.put(NAMESPACE, name, image)
    out = memory()
    assert await tier.get(NAMESPACE, name, out)
    assert out.tobytes() == image.tobytes()
    assert tier.breaker.state is BreakerState.CLOSED


async def test_a_bad_value_is_deleted_only_while_it_is_the_one_that_was_read(valkey, open_tier, tmp_path):
    name, image = page(1)
    key = page_key(NAMESPACE, name)
    good = encode_header(name, image) + image
    bad = bytearray(good)
    bad[-1] ^= 1
    valkey.client.set(key, bytes(bad))

    async def forward(command: list[bytes], writer: asyncio.StreamWriter) -> None:
        if command[0] == b"EVAL":
            valkey.client.set(key, good)  # another client is faster
            writer.write(b":%d\r\n" % valkey.client.execute_command(*command))
        else:
            value = valkey.client.execute_command(*command)
            writer.write(b"$%d\r\n%b\r\n" % (len(value), value))

    async with scripted_redis(tmp_path / "socket", forward) as url:
        with pytest.raises(CorruptPageError):
            await open_tier(url).get(NAMESPACE, name, memory())
    assert valkey.client.get(key) == good


async def test_a_key_of_another_type_is_an_error_and_the_next_put_replaces_it(valkey, open_tier):
    tier = open_tier(valkey.url)
    name, image = page(1)
    valkey.client.rpush(page_key(NAMESPACE, name), "a list")
    with pytest.raises(RedisUnavailableError, match="WRONGTYPE"):
        await tier.get(NAMESPACE, name, memory())
    await tier.put(NAMESPACE, name, image)
    assert await tier.get(NAMESPACE, name, memory())


async def test_a_full_redis_says_so_and_serves_what_it_has(start_valkey, open_tier):
    valkey = start_valkey(maxmemory="12mb", maxmemory_policy="noeviction")
    tier = open_tier(valkey.url, num_connections=1)
    stored: list[tuple[PageName, memoryview]] = []
    with pytest.raises(RedisFullError, match="maxmemory"):
        for seed in range(100):
            name, image = page(seed, 500_000)
            await tier.put(NAMESPACE, name, image)
            stored.append((name, image))
    assert stored
    for name, image in stored:
        out = memory(500_000)
        assert await tier.get(NAMESPACE, name, out)
        assert out.tobytes() == image.tobytes()
    assert tier.breaker.state is BreakerState.CLOSED
    valkey.client.config_set("maxmemory", "200mb")
    await tier.put(NAMESPACE, *page(1000, 500_000))
