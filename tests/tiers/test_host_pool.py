"""The host pool takes its memory in the background: what is ready may be used, and grows."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from pathlib import Path

import pytest
from serving import PAGE_SIZE, attach, directory, eventually, only_cache, small_config, some_tokens, store

from kvtier.daemon.server import running
from kvtier.errors import ConfigurationError
from kvtier.tiers.host import HostPool
from kvtier.tiers.shared_memory import SharedMemory, free_bytes

__all__ = ["directory"]

NAME = f"kvtier-test-host-{os.getpid()}"
PAGE = 1 << 16
real_fallocate = os.posix_fallocate


def wait_for(pool: HostPool, ready_pages: int) -> None:
    deadline = time.monotonic() + 20
    while pool.ready_pages < ready_pages:
        assert time.monotonic() < deadline, f"{pool.ready_pages} pages are ready"
        time.sleep(0.001)


def taken_on_disk(pool: HostPool) -> int:
    return os.stat(pool._shared.path).st_blocks * 512


def test_a_small_pool_is_ready_at_once() -> None:
    pool = HostPool(NAME, 10, PAGE)
    assert pool.ready_pages == 10
    assert taken_on_disk(pool) == 10 * PAGE
    pool.close()
    assert not pool._shared.path.exists()


def test_a_large_one_becomes_ready_chunk_by_chunk(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    permits = threading.Semaphore(1)

    def fallocate(descriptor: int, offset: int, size: int) -> None:
        assert permits.acquire(timeout=10)
        real_fallocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    pool = HostPool(NAME, 10, PAGE, chunk_bytes=4 * PAGE)
    assert pool.ready_pages == 4
    assert taken_on_disk(pool) == 4 * PAGE
    for ready_pages in (8, 10):
        permits.release()
        wait_for(pool, ready_pages)
        assert taken_on_disk(pool) == ready_pages * PAGE
    pool.close()
    assert f"took {10 * PAGE} of {10 * PAGE} bytes of host memory" in caplog.text


def test_its_memory_is_taken_by_the_cpus_that_it_should_be_near(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.sched_getaffinity(0)
    cpu = max(own)
    taken_by: list[set[int]] = []

    def fallocate(descriptor: int, offset: int, size: int) -> None:
        taken_by.append(os.sched_getaffinity(0))
        real_fallocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    for cpus, expected in ((frozenset({cpu}), {cpu}), (frozenset({1000}), own), (frozenset[int](), own)):
        taken_by.clear()
        pool = HostPool(NAME, 2, PAGE, cpus, chunk_bytes=PAGE)
        wait_for(pool, 2)
        pool.close()
        assert taken_by == [expected, expected]
    assert os.sched_getaffinity(0) == own


def test_closing_does_not_wait_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    began, permits = threading.Semaphore(0), threading.Semaphore(1)

    def fallocate(descriptor: int, offset: int, size: int) -> None:
        began.release()
        assert permits.acquire(timeout=10)
        real_fallocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    pool = HostPool(NAME, 100, PAGE, chunk_bytes=PAGE)
    for _ in range(2):
        assert began.acquire(timeout=10)  # the second chunk is under way
    closing = threading.Thread(target=pool.close)
    closing.start()
    permits.release()
    closing.join(10)
    assert not closing.is_alive()
    assert pool.ready_pages == 2


def test_a_machine_that_runs_out_of_memory_keeps_what_it_has(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fallocate(descriptor: int, offset: int, size: int) -> None:
        if offset >= 6 * PAGE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_fallocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    pool = HostPool(NAME, 10, PAGE, chunk_bytes=3 * PAGE)
    pool._thread.join(10)
    assert pool.ready_pages == 6
    assert f"the host pool stays at {6 * PAGE} of {10 * PAGE} bytes: " in caplog.text
    assert "make the pools smaller, or /dev/shm larger" in caplog.text
    assert SharedMemory.untaken_bytes() == 0  # others may have the rest
    pool.close()


def test_a_pool_that_finds_no_memory_at_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fallocate(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    with pytest.raises(ConfigurationError, match="do not fit"):
        HostPool(NAME, 10, PAGE)
    assert not (Path("/dev/shm") / NAME).exists()
    assert "kvtier-host-pool" not in {thread.name for thread in threading.enumerate()}


def test_more_than_the_machine_has_is_refused_at_once() -> None:
    num_pages = free_bytes() // PAGE + 1
    with pytest.raises(ConfigurationError, match=f"{num_pages * PAGE:,} bytes of shared memory do not fit"):
        HostPool(NAME, num_pages, PAGE)
    assert not (Path("/dev/shm") / NAME).exists()


def test_pools_that_do_not_fit_together_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one grows still when the second is opened, as those of ranks are."""
    monkeypatch.setattr(HostPool, "_grow", lambda pool: pool._is_closing.wait(20))
    num_pages = free_bytes() * 6 // 10 // PAGE
    first = HostPool(NAME, num_pages, PAGE, chunk_bytes=PAGE)
    try:
        with pytest.raises(ConfigurationError, match="bytes of shared memory do not fit"):
            HostPool(f"{NAME}-2", num_pages, PAGE, chunk_bytes=PAGE)
    finally:
        first.close()
    HostPool(NAME, num_pages, PAGE, chunk_bytes=PAGE).close()
    assert not list(Path("/dev/shm").glob(f"{NAME}*"))


async def test_a_daemon_serves_while_its_host_pool_grows(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    permits = threading.Semaphore(1)

    def fallocate(descriptor: int, offset: int, size: int) -> None:
        assert threading.current_thread().name != "kvtier-host-pool" or permits.acquire(timeout=20)
        real_fallocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)

    class SlowPool(HostPool):
        def __init__(self, name: str, num_pages: int, page_bytes: int, cpus: frozenset[int]) -> None:
            super().__init__(name, num_pages, page_bytes, cpus, chunk_bytes=16 * page_bytes)

    monkeypatch.setattr("kvtier.daemon.registry.HostPool", SlowPool)
    prompts = [some_tokens(8, seed) for seed in range(8)]  # 64 pages
    async with running(small_config(directory, 16, 48)) as operator, await attach(directory) as session:
        assert only_cache(operator).host.pages == 16
        for prompt in prompts:
            await store(session, "tenant", prompt)
        assert only_cache(operator).tree_pages == 32
        permits.release(2)
        await eventually(lambda: only_cache(operator).host.pages == 48)
        for prompt in prompts[:5]:
            await store(session, "tenant", prompt, wait_s=10)
        for prompt in prompts[:5]:  # `store` checks the bytes
            lease = await store(session, "tenant", prompt, wait_s=10)
            assert lease.matched_tokens.total == 8 * PAGE_SIZE
        assert only_cache(operator).tree_pages >= 40
