"""A worker whose daemon is killed, comes back, or hangs."""

from __future__ import annotations

import signal
import time
import weakref
from pathlib import Path

import pytest
from scratch_pool import assert_same_reply
from small_daemon import FORMAT, held_pages, reference, settings, small_daemon, worker
from tiny_models import random_tokens, tiny_model
from worker_fixtures import StartWorker, wait_until

from kvtier.client import Lease
from kvtier.errors import DaemonUnavailableError
from kvtier.launch import DaemonProcess, daemon_process
from kvtier.tiers.embedded import stop_embedded_redis
from kvtier.worker import PrefillAttends, Request

__all__ = ["settings", "small_daemon", "worker"]


def test_a_daemon_that_is_killed_and_starts_again(
    directory: Path, settings: dict[str, object], start_worker: StartWorker
) -> None:
    """Sequences under way begin anew on the new daemon and end with the tokens that they would have had."""
    requests = [Request("crash", random_tokens(30 + seed, seed), 40) for seed in range(3)]
    daemon = DaemonProcess.start(directory, **settings)
    try:
        worker = start_worker("llama", FORMAT, PrefillAttends.QUANTIZED, daemon.address)
        sequences = [worker.submit(request) for request in requests]
        for _ in range(12):
            worker.step()
        daemon.kill()
        daemon = DaemonProcess.start(directory, **settings)
        while any(sequence.reply is None for sequence in sequences):
            worker.step()
        for request, sequence in zip(requests, sequences, strict=True):
            assert sequence.reply is not None
            assert sequence.reply.statistics.restarts == 1
            same = reference(start_worker, request)
            assert_same_reply(tiny_model("llama"), FORMAT, request.prompt, sequence.reply.tokens, same.tokens)
        assert held_pages(daemon.address) == 0
    finally:
        daemon.stop()
        stop_embedded_redis(directory / "data")


def test_a_worker_without_work_keeps_no_memory_of_a_dead_daemon(
    directory: Path, settings: dict[str, object], start_worker: StartWorker
) -> None:
    """Else the next daemon might find too little for its own pool, for as long as nobody asks this worker anything."""
    with daemon_process(directory, **settings) as daemon:
        worker = start_worker("llama", FORMAT, PrefillAttends.QUANTIZED, daemon.address)
        worker.generate(Request("idle", random_tokens(30), 3))
        memory = weakref.ref(worker._session.pool.memory)
        assert memory() is not None
        daemon.kill()
        deadline = time.monotonic() + 30.0
        while memory() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
    assert memory() is None


def test_a_request_fails_when_no_daemon_comes_back(
    directory: Path, settings: dict[str, object], start_worker: StartWorker
) -> None:
    with daemon_process(directory, **settings) as daemon:
        worker = start_worker("llama", FORMAT, PrefillAttends.QUANTIZED, daemon.address, timeout_s=1.0, patience_s=0.1)
        sequence = worker.submit(Request("gone", random_tokens(30), 40))
        worker.step()
        daemon.kill()
        while sequence.reply is None:
            worker.step()
    assert isinstance(sequence.reply.error, DaemonUnavailableError)
    assert len(sequence.reply.tokens) >= 1


def test_a_daemon_that_hangs_keeps_no_worker_waiting_for_releases(
    directory: Path, settings: dict[str, object], start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases whose time is over are given back in the background; the daemon has them back when it wakes up."""
    with daemon_process(directory, **(settings | {"lease_ttl_s": 0.5, "grace_s": 30.0})) as process:
        worker = start_worker("llama", FORMAT, PrefillAttends.QUANTIZED, process.address)
        sequences = [worker.submit(Request("t", random_tokens(30, seed), 40)) for seed in range(3)]
        while len(worker._running) < 3:
            worker.step()
        process.process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(0.6)
            with monkeypatch.context() as patch:
                patch.setattr(Lease, "release", lambda _: pytest.fail("waits for a daemon that hangs"))
                worker._grow()
                assert not [sequence for sequence in sequences if worker._is_held(sequence)]
        finally:
            process.process.send_signal(signal.SIGCONT)
        while any(sequence.reply is None for sequence in sequences):
            worker.step()
        for sequence in sequences:
            assert sequence.reply is not None and sequence.reply.error is None
            assert sequence.reply.statistics.restarts > 0
        wait_until(lambda: held_pages(process.address) == 0)
