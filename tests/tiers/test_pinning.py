"""Host memory is pinned in the background, from the first byte to the last."""

from __future__ import annotations

import errno
import logging
import os
import threading

import pytest

from kvtier.errors import GpuError
from kvtier.tiers.host import HostPool
from kvtier.tiers.pinning import Pinning

ADDRESS = 1 << 40
CHUNK = 1 << 20


class CountingRegistrar:
    """Keeps account of what is pinned; each chunk waits for `permits`, and the machine has room for `limit` bytes."""

    def __init__(self, limit: int = 1 << 60) -> None:
        self.pinned: dict[int, int] = {}
        self.permits = threading.Semaphore(0)
        self.began = threading.Semaphore(0)
        self._limit = limit

    def register(self, address: int, num_bytes: int) -> None:
        self.began.release()
        assert self.permits.acquire(timeout=10)
        if sum(self.pinned.values()) + num_bytes > self._limit:
            raise GpuError("cuMemHostRegister failed: out of memory")
        self.pinned[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.pinned[address]


def pin(registrar: CountingRegistrar, num_bytes: int) -> Pinning:
    """Pins memory that is all ready."""
    return Pinning(registrar, ADDRESS, CHUNK, lambda: num_bytes, lambda: num_bytes)


def test_memory_is_pinned_chunk_by_chunk_and_given_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    registrar = CountingRegistrar()
    pinning = pin(registrar, 2 * CHUNK + 5000)
    for number in range(3):
        assert registrar.began.acquire(timeout=10)
        assert pinning.pinned_bytes == number * CHUNK  # what is under way does not count
        registrar.permits.release()
    pinning.wait()
    assert pinning.pinned_bytes == 2 * CHUNK + 5000
    assert registrar.pinned == {ADDRESS: CHUNK, ADDRESS + CHUNK: CHUNK, ADDRESS + 2 * CHUNK: 5000}
    assert f"pinned {2 * CHUNK + 5000} of {2 * CHUNK + 5000} bytes" in caplog.text
    pinning.close()
    assert registrar.pinned == {}
    assert pinning.pinned_bytes == 0


def test_only_what_is_ready_is_pinned() -> None:
    registrar, ready = CountingRegistrar(), [CHUNK]
    registrar.permits.release(8)
    pinning = Pinning(registrar, ADDRESS, CHUNK, lambda: 3 * CHUNK, lambda: ready[0])
    assert registrar.began.acquire(timeout=10)
    assert not registrar.began.acquire(timeout=0.2)
    assert pinning.pinned_bytes == CHUNK
    ready[0] = 3 * CHUNK
    pinning.wait()
    assert pinning.pinned_bytes == 3 * CHUNK
    pinning.close()
    waiting = Pinning(registrar, ADDRESS, CHUNK, lambda: 3 * CHUNK, lambda: 0)
    waiting.close()
    assert registrar.pinned == {}


def test_all_is_pinned_of_a_pool_that_could_not_grow_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    may_fail = threading.Event()
    real_fallocate = os.posix_fallocate

    def fallocate(descriptor: int, offset: int, size: int) -> None:
        if offset:
            assert may_fail.wait(10)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_fallocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    ready_bytes = 2 * CHUNK + 4096
    pool = HostPool(f"kvtier-test-pinning-{os.getpid()}", 4, CHUNK, chunk_bytes=ready_bytes)
    registrar = CountingRegistrar()
    registrar.permits.release(8)
    pinning = Pinning(registrar, pool.address, CHUNK, lambda: pool.final_bytes, lambda: pool.ready_bytes)
    try:
        for _ in range(2):
            assert registrar.began.acquire(timeout=10)
        assert not registrar.began.acquire(timeout=0.2)  # the third chunk may become whole still
        may_fail.set()
        assert registrar.began.acquire(timeout=10)
        pinning.wait()
        assert pinning.pinned_bytes == pool.ready_bytes == ready_bytes
        assert list(registrar.pinned.values()) == [CHUNK, CHUNK, 4096]
    finally:
        may_fail.set()
        pinning.close()
        pool.close()
    assert registrar.pinned == {}


def test_it_ends_with_the_chunk_under_way_when_it_is_closed() -> None:
    registrar = CountingRegistrar()
    pinning = pin(registrar, 8 * CHUNK)
    registrar.permits.release()
    for _ in range(2):
        assert registrar.began.acquire(timeout=10)  # the second chunk is under way
    closing = threading.Thread(target=pinning.close)
    closing.start()
    registrar.permits.release(7)
    closing.join(10)
    assert not closing.is_alive()
    assert registrar.pinned == {}
    assert registrar.permits.acquire(blocking=False), "not all chunks were pinned"


def test_what_cannot_be_pinned_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    registrar = CountingRegistrar(limit=2 * CHUNK)
    registrar.permits.release(8)
    pinning = pin(registrar, 8 * CHUNK)
    pinning.wait()
    assert pinning.pinned_bytes == 2 * CHUNK
    assert f"only {2 * CHUNK} of {8 * CHUNK} bytes of host memory are pinned" in caplog.text
    assert "cuMemHostRegister failed: out of memory; raise the limit of locked memory (ulimit -l)" in caplog.text
    pinning.close()
    assert registrar.pinned == {}
