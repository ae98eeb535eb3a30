"""How a pool travels to a worker, and how long the worker has it."""

from __future__ import annotations

import importlib.util
import weakref
from pathlib import Path

import numpy as np
import pytest
from serving import IDENTITY, PAGE_BYTES, attach, eventually, small_config

from kvtier.client import PoolMapping
from kvtier.daemon.server import running
from kvtier.errors import ConfigurationError, SessionLostError
from kvtier.protocol import pool_from_message, pool_to_message
from kvtier.tiers.base import CudaIpc, PoolHandle, SharedMemoryFile
from kvtier.v1 import cache_pb2 as pb

HANDLES = [
    PoolHandle(SharedMemoryFile("/dev/shm/kvtier-1-device"), 64, 1152),
    PoolHandle(CudaIpc(bytes(range(64)), "GPU-2f6e1c3a-0000-11aa-22bb-aabbccddeeff"), 2**31 - 1, 2_359_296),
]


@pytest.mark.parametrize("handle", HANDLES)
def test_handles_arrive_as_they_were_sent(handle: PoolHandle) -> None:
    assert pool_from_message(pb.DevicePool.FromString(pool_to_message(handle).SerializeToString())) == handle


def test_a_pool_in_memory_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="update the worker"):
        pool_from_message(pb.DevicePool(num_pages=64, page_bytes=1152))


@pytest.mark.skipif(importlib.util.find_spec("cuda") is not None, reason="cuda-bindings is installed")
def test_a_pool_on_a_gpu_names_what_is_missing_to_map_it() -> None:
    with pytest.raises(ConfigurationError, match=r"lies on GPU-2f6e1c3a-.*; to map it, install 'kvtier\[gpu\]'"):
        PoolMapping(HANDLES[1], "epoch", "pool")


async def test_a_session_that_ended_lets_go_of_the_pool_and_the_worker_keeps_what_it_took(directory: Path) -> None:
    async with running(small_config(directory)):
        async with await attach(directory, IDENTITY) as session:
            first = session.pool
            told: list[str] = []
            first.when_let_go(lambda: told.append("when it is let go"))
            lease = await session.acquire("tenant", b"", reserve_pages=1)
            taken = first.memory
            assert taken.shape == (64, PAGE_BYTES)
            memory = weakref.ref(taken)
            stream = await session.stream()
            stream.end()  # as when the connection breaks
            assert told == []
            await eventually(lambda: session.pool is not first)
            first.when_let_go(lambda: told.append("at once"))
            assert told == ["when it is let go", "at once"]
            with pytest.raises(SessionLostError, match="take the pool of the next one"):
                _ = first.memory
            assert (first.num_pages, first.page_bytes) == (64, PAGE_BYTES)
            assert isinstance(taken, np.ndarray)
            taken[lease.reserved_pages] = 7
            assert (session.pool.memory[lease.reserved_pages] == 7).all()  # one pool, mapped twice
            del taken
            assert memory() is None
        with pytest.raises(SessionLostError):
            _ = session.pool.memory
