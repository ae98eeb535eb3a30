"""The far tier: pages in Redis, one value a page, one round trip to write or to read.

A key is `kvtier:1:<namespace>:<fingerprint>:<chain key>:<rank>`, where 1 is the version of the envelope and the
fingerprint is cut to 16 hexadecimal digits; the value is the envelope's header, then the page image. A Redis user needs
GET, SET, EXISTS, SCAN, UNLINK, PING and EVAL on `kvtier:*`, and in a cluster also CLUSTER SLOTS and COMMAND.

Blocking sockets in threads carry the bytes, so none crosses the event loop. A call waits for its turn, since the bytes
under way are bounded, and then has `timeout_s` seconds, whatever the server does. The first call makes the client: a
Redis that is down when the daemon starts is the same as one that goes down later.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import redis
from redis.cluster import RedisCluster
from redis.exceptions import InvalidResponse

from kvtier.errors import CorruptPageError, RedisFullError, RedisUnavailableError
from kvtier.pages.chain import check_namespace
from kvtier.pages.envelope import ENVELOPE_VERSION, PageName, check_envelope, encode_header
from kvtier.tiers.breaker import Breaker
from kvtier.tiers.redis_call import Call
from kvtier.tiers.redis_caller import RedisCaller
from kvtier.tiers.redis_url import RedisClient, parse_redis_url
from kvtier.tiers.redis_wire import StoredPage, WrongSize

_log = logging.getLogger(__name__)

_EXISTS_BATCH = 256
_SCAN_BATCH = 512
_DELETE_IF_UNCHANGED = """
if redis.call('STRLEN', KEYS[1]) ~= tonumber(ARGV[1]) then return 0 end
if ARGV[2] ~= '' and redis.sha1hex(redis.call('GET', KEYS[1])) ~= ARGV[2] then return 0 end
return redis.call('UNLINK', KEYS[1])
"""


class RedisTier:
    """Pages in Redis. For the event loop in which `open` made it.

    Every method raises `RedisUnavailableError` when Redis does not answer in time, refuses, or is left alone because it
    failed several times in a row (`breaker`); nothing of it is retried for longer than the deadline.
    """

    def __init__(self, caller: RedisCaller, ttl_s: int | None) -> None:
        self._caller = caller
        self._ttl_s = ttl_s

    @classmethod
    def open(
        cls,
        url: str,
        *,
        timeout_s: float = 2.0,
        num_connections: int = 4,
        max_in_flight_bytes: int = 64 << 20,
        ttl_s: int | None = None,
    ) -> RedisTier:
        """A tier on the Redis at `url` (see `redis_url`); connects when first used.

        Args:
            timeout_s: how long a call may take once it is under way.
            num_connections: pages under way at a time.
            max_in_flight_bytes: their bytes.
            ttl_s: seconds after which Redis drops a page; None keeps it until Redis evicts it.

        Raises:
            ConfigurationError: `url` cannot be the URL of a Redis.
        """
        target = parse_redis_url(url, timeout_s=timeout_s, max_connections=RedisCaller.max_connections(num_connections))
        caller = RedisCaller(
            target, timeout_s=timeout_s, num_connections=num_connections, max_in_flight_bytes=max_in_flight_bytes
        )
        return cls(caller, ttl_s)

    @property
    def breaker(self) -> Breaker:
        """Its state and the last error say how Redis is doing."""
        return self._caller.breaker

    async def put(self, namespace: str, name: PageName, image: memoryview) -> None:
        """Stores a page; `image` is its contiguous bytes. Raises `RedisFullError` when Redis has no memory left."""
        key = page_key(namespace, name)
        expiry = () if self._ttl_s is None else ("EX", self._ttl_s)

        def write(client: RedisClient, call: Call) -> None:
            with call:
                header = encode_header(name, image)
            if client.execute_command("SET", key, StoredPage(header, image), *expiry) is not True:
                raise InvalidResponse("SET was answered by something else than OK")

        await self._caller.call(write, sends=image)

    async def get(self, namespace: str, name: PageName, out: memoryview) -> bool:
        """Reads a page into `out`, whose size is that of its image. False: Redis does not have it.

        Unless this returns True, `out` may hold anything. A value that is not this page is deleted, if it still is the
        one that was read, and raises `CorruptPageError`.
        """
        key = page_key(namespace, name)

        def read(client: RedisClient, call: Call) -> bool | _Rejected:
            value = client.execute_command("GET", key)
            if value is None:
                return False
            if isinstance(value, WrongSize):
                return _Rejected(value.num_bytes, "", f"it has {value.num_bytes} bytes")
            with call:
                return _rejection(value, name) or True

        found = await self._caller.call(read, receives=out)
        if isinstance(found, bool):
            return found
        await self._delete_value(key, found)
        raise CorruptPageError(f"Redis had a value under {key} that is not its page: {found.reason}")

    async def count_prefix(self, namespace: str, names: Sequence[PageName]) -> int:
        """How many leading pages of `names` Redis has."""
        for start in range(0, len(names), _EXISTS_BATCH):
            exists = await self._exist(namespace, names[start : start + _EXISTS_BATCH])
            if not all(exists):
                return start + exists.index(False)
        return len(names)

    async def which_exist(self, namespace: str, names: Sequence[PageName]) -> list[bool]:
        """For each page of `names`, whether Redis has it."""
        exist: list[bool] = []
        for start in range(0, len(names), _EXISTS_BATCH):
            exist += await self._exist(namespace, names[start : start + _EXISTS_BATCH])
        return exist

    async def _exist(self, namespace: str, names: Sequence[PageName]) -> list[bool]:
        keys = [page_key(namespace, name) for name in names]
        return await self._caller.call(functools.partial(_exist, keys))

    async def flush_namespace(self, namespace: str) -> int:
        """Deletes every page of `namespace`, on every node; returns how many. Pages stored meanwhile may stay."""
        pattern = f"{_escape_glob(_prefix(namespace))}*"
        count = 0
        for node in await self._caller.call(_masters):
            cursor = None
            while cursor != 0:
                cursor, deleted = await self._caller.call(functools.partial(_delete_some, node, cursor or 0, pattern))
                count += deleted
        return count

    async def ping(self) -> None:
        """Returns when Redis answers."""
        await self._caller.call(_ping)

    async def probe(self, interval_s: float = 1.0) -> None:
        """Asks Redis now and again, for ever, so that `breaker` is right even while nobody needs a page."""
        while True:
            with suppress(RedisUnavailableError):
                await self.ping()
            await asyncio.sleep(interval_s)

    async def close(self) -> None:
        """Breaks off what is under way (with `RedisUnavailableError`) and closes the connections, in bounded time."""
        await self._caller.close()

    async def _delete_value(self, key: str, rejected: _Rejected) -> None:
        def delete(client: RedisClient, call: Call) -> None:
            client.execute_command("EVAL", _DELETE_IF_UNCHANGED, 1, key, rejected.num_bytes, rejected.sha1_hex)

        try:
            await self._caller.call(delete)
        except (RedisUnavailableError, RedisFullError) as error:
            _log.warning("a value that is not its page stays in Redis: %s", error)


class _Rejected(NamedTuple):
    """A stored value that is not the page of its key. `sha1_hex` is empty when the size alone rules it out."""

    num_bytes: int
    sha1_hex: str
    reason: str


def page_key(namespace: str, name: PageName) -> str:
    """The key of a page."""
    return f"{_prefix(namespace)}{name.fingerprint.hex()[:16]}:{name.key.hex()}:{name.rank}"


def _prefix(namespace: str) -> str:
    return f"kvtier:{ENVELOPE_VERSION}:{check_namespace(namespace)}:"


def _escape_glob(text: str) -> str:
    return re.sub(r"[*?\[\]\\^-]", r"\\\g<0>", text)


def _rejection(page: StoredPage, name: PageName) -> _Rejected | None:
    try:
        check_envelope(page.header, page.image, name)
    except CorruptPageError as error:
        digest = hashlib.sha1(page.header)
        digest.update(page.image)
        return _Rejected(len(page.header) + len(page.image), digest.hexdigest(), str(error))
    return None


def _exist(keys: Sequence[str], client: RedisClient, call: Call) -> list[bool]:
    with client.pipeline(transaction=False) as pipeline:
        for key in keys:
            pipeline.execute_command("EXISTS", key)
        return [bool(exists) for exists in pipeline.execute()]


def _masters(client: RedisClient, call: Call) -> list[redis.Redis]:
    if isinstance(client, RedisCluster):
        return [client.get_redis_connection(node) for node in client.get_primaries()]
    return [client]


def _delete_some(node: redis.Redis, cursor: int, pattern: str, client: RedisClient, call: Call) -> tuple[int, int]:
    """One step of a scan of `node`: the next cursor, 0 at the end, and the number of keys deleted."""
    next_cursor, keys = node.scan(cursor, match=pattern, count=_SCAN_BATCH)
    with node.pipeline(transaction=False) as pipeline:
        for key in keys:  # one by one, since in a cluster a command must not name keys of different slots
            pipeline.execute_command("UNLINK", key)
        return next_cursor, sum(pipeline.execute())


def _ping(client: RedisClient, call: Call) -> None:
    if isinstance(client, RedisCluster):
        client.execute_command("PING", target_nodes=RedisCluster.RANDOM)
    else:
        client.execute_command("PING")
