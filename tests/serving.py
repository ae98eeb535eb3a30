"""What tests of the daemon share: a small identity, settings of a small daemon, and pages with known bytes.

async with running(small_config(directory)) as operator, await attach(directory) as session:
    tokens = some_tokens(3, seed=1)
    await store(session, "tenant", tokens)
    lease = await session.acquire("tenant", tokens)
    assert_true_pages(session, lease, "tenant", tokens)
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import grpc
import numpy as np
import numpy.typing as npt
import pytest
import redis

from kvtier.client import AsyncLease, AsyncSession
from kvtier.config import Config
from kvtier.daemon.operator import Operator
from kvtier.pages.chain import chain_keys, extras_by_page, root_key
from kvtier.pages.fingerprint import CacheIdentity
from kvtier.pages.layout import PageFormat, PageLayout
from kvtier.protocol import identity_to_message
from kvtier.v1 import admin_pb2 as admin
from kvtier.v1 import cache_pb2 as pb
from kvtier.v1 import cache_pb2_grpc

PAGE_SIZE = 16
VOCAB_SIZE = 1000
IDENTITY = CacheIdentity("test-model", "r1", VOCAB_SIZE, PageLayout(PageFormat.NVFP4, 1, 1, 16, PAGE_SIZE))
PAGE_BYTES = IDENTITY.layout.page_bytes

Tokens = npt.NDArray[np.uint32]


def other_identity(**changes: Any) -> CacheIdentity:
    """The identity of the tests with some fields changed; those of the layout too."""
    of_layout = {name: changes.pop(name) for name in list(changes) if name in PageLayout.__dataclass_fields__}
    return dataclasses.replace(IDENTITY, layout=dataclasses.replace(IDENTITY.layout, **of_layout), **changes)


def pool_settings(device_pages: int = 64, host_pages: int = 64) -> dict[str, Any]:
    """Memory for so many pages of `IDENTITY`, all of it the CPU's."""
    return {
        "device": "shared-memory",
        "device_bytes": device_pages * PAGE_BYTES,
        "host_bytes": host_pages * PAGE_BYTES,
    }


def small_config(directory: Path, device_pages: int = 64, host_pages: int = 64, **settings: Any) -> Config:
    """Settings of a daemon on `directory/kvtier.sock`, without Redis and metrics unless asked for."""
    defaults: dict[str, Any] = {
        "socket": directory / "kvtier.sock",
        "redis": "none",
        "metrics": "off",
        "drain_s": 5.0,
        "grace_s": 0.3,
        **pool_settings(device_pages, host_pages),
    }
    return Config.load(**(defaults | settings))


async def attach(directory: Path, identity: CacheIdentity = IDENTITY, timeout_s: float = 10.0) -> AsyncSession:
    """A session with the daemon of `small_config(directory)`."""
    return await AsyncSession.connect(f"unix:{directory}/kvtier.sock", identity, timeout_s=timeout_s)


def some_tokens(num_pages: int, seed: int) -> Tokens:
    """Random tokens that fill so many pages."""
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, num_pages * PAGE_SIZE, dtype=np.uint32)


def true_images(
    identity: CacheIdentity, namespace: str, tokens: Tokens, extra_keys: list[tuple[int, bytes]] | None = None
) -> npt.NDArray[np.uint8]:
    """The bytes that tests write into the pages of a prompt: they follow from all that a page's name depends on."""
    size = identity.layout.page_size
    extras = extras_by_page(extra_keys or [], size)
    keys = chain_keys(root_key(identity.fingerprint, namespace), tokens.astype("<u4").tobytes(), size, extras)
    seeds = (int.from_bytes(key[:16], "little") for key in keys)
    images = [np.random.default_rng(seed).bytes(identity.layout.page_bytes) for seed in seeds]
    return np.frombuffer(b"".join(images), np.uint8).reshape(len(keys), identity.layout.page_bytes)


async def store(
    session: AsyncSession,
    namespace: str,
    tokens: Tokens,
    extra_keys: list[tuple[int, bytes]] | None = None,
    wait_s: float = 0.0,
) -> AsyncLease:
    """Acquires a prompt, writes and commits the pages that are missing, and releases; returns the ended lease."""
    size = session.identity.layout.page_size
    num_pages = tokens.size // size
    lease = await session.acquire(namespace, tokens, extra_keys=extra_keys or (), wait_s=wait_s)
    matched = lease.matched_pages.size
    assert_true_pages(session, lease, namespace, tokens, extra_keys)
    if matched < num_pages:
        pages = await lease.extend(num_pages - matched)
        session.pool.memory[pages] = true_images(session.identity, namespace, tokens, extra_keys)[matched:num_pages]
        await lease.commit(tokens[matched * size : num_pages * size], pages, extra_keys or ())
    await lease.release()
    return lease


def assert_true_pages(
    session: AsyncSession,
    lease: AsyncLease,
    namespace: str,
    tokens: Tokens,
    extra_keys: list[tuple[int, bytes]] | None = None,
) -> None:
    """The matched pages of a lease on `tokens` hold what `store` wrote for these tokens, and are as many as it says."""
    count = lease.matched_pages.size
    assert lease.matched_tokens.total == count * session.identity.layout.page_size
    expected = true_images(session.identity, namespace, tokens, extra_keys)[:count]
    np.testing.assert_array_equal(session.pool.memory[lease.matched_pages], expected)


async def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Returns once `condition` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def state_of(operator: Operator) -> admin.GetStatisticsResponse:
    """All figures of a daemon but its age, after an integrity check of every cache: to compare before and after.

    For moments in which nothing is on its way between tiers.
    """
    for cache in operator.registry:
        cache.index.check_integrity()
    statistics = operator.statistics()
    statistics.ClearField("uptime_seconds")
    return statistics


def only_cache(operator: Operator) -> admin.CacheStatistics:
    """The figures of the only cache of a daemon, at any moment."""
    (cache,) = operator.statistics().caches
    return cache


class Valkey(Protocol):
    """What the fixture `valkey` gives."""

    url: str
    client: redis.Redis

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


@pytest.fixture
def directory() -> Iterator[Path]:
    """An empty directory with a short path: a socket's path may have 107 bytes, and that of tmp_path can be longer."""
    with tempfile.TemporaryDirectory(prefix="kvtier-") as path:
        yield Path(path)


class RawSession:
    """A session without the client library, to send what that would not."""

    def __init__(self, directory: Path) -> None:
        self._channel = grpc.aio.insecure_channel(f"unix:{directory}/kvtier.sock")
        self._call = cache_pb2_grpc.CacheServiceStub(self._channel).Session()

    async def ask(self, **request: Any) -> pb.SessionResponse:
        """The answer to one request, sent alone."""
        await self._call.write(pb.SessionRequest(request_id=7, **request))
        response = await self._call.read()
        assert isinstance(response, pb.SessionResponse), "the stream ended"
        assert response.request_id == 7
        return response

    async def ask_at_once(self, *requests: dict[str, Any]) -> list[pb.SessionResponse]:
        """The answers to several requests that are under way together, in the order of the requests."""
        for number, request in enumerate(requests):
            await self._call.write(pb.SessionRequest(request_id=number, **request))
        return sorted([await self._call.read() for _ in requests], key=lambda response: response.request_id)

    async def send(self, **request: Any) -> None:
        """Sends a request whose answer is not read."""
        await self._call.write(pb.SessionRequest(request_id=7, **request))

    async def attach(self, identity: CacheIdentity = IDENTITY) -> pb.AttachResponse:
        """Attaches; the answer must be no error."""
        response = await self.ask(attach=pb.AttachRequest(identity=identity_to_message(identity)))
        assert response.HasField("attach"), response
        return response.attach

    async def acquire(self, namespace: str, tokens: bytes = b"", reserve_pages: int = 0) -> pb.AcquireResponse:
        """Acquires; the answer must be no error."""
        request = pb.AcquireRequest(namespace=namespace, tokens=tokens, reserve_pages=reserve_pages)
        response = await self.ask(acquire=request)
        assert response.HasField("acquire"), response
        return response.acquire

    async def __aenter__(self) -> RawSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._call.done():
            await self._call.done_writing()
            await self.ended()
        await self._channel.close()

    def leave(self) -> None:
        """Goes without reading what is on its way."""
        self._call.cancel()

    async def ended(self) -> None:
        """Returns when the daemon has ended the stream, without an answer before."""
        assert await self._call.read() is grpc.aio.EOF
