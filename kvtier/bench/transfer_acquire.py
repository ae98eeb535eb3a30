"""What a worker waits for the prefix of a long prompt, on the device and in host memory, from a daemon over gRPC."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.bench.transfer import PREFIX_PAGE_BYTES, PREFIX_PAGES
from kvtier.client import Session, connect
from kvtier.errors import ConfigurationError
from kvtier.launch import daemon_process
from kvtier.memory import keep_memory_at_hand
from kvtier.pages.fingerprint import CacheIdentity
from kvtier.pages.layout import PageFormat, PageLayout

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from kvtier.cuda_driver import Gpu

_VOCAB_SIZE = 128_256
_IDENTITY = CacheIdentity("bench", "none", _VOCAB_SIZE, PageLayout(PageFormat.NVFP4, 32, 8, 128, 64))
_DEVICE_PAGES = PREFIX_PAGES + 64
_HOST_PAGES = PREFIX_PAGES + 256
_NAMESPACE = "bench"
_METRICS = "127.0.0.1:9479"
_ROUNDS = 5
_SESSIONS = 20
_PROCESSES = 9
_TIMEOUT_S = 120.0


def _prompt() -> bytes:
    num_tokens = PREFIX_PAGES * _IDENTITY.layout.page_size
    return np.random.default_rng(7).integers(0, _VOCAB_SIZE, num_tokens, dtype=np.uint32).tobytes()


def _connect(address: str) -> Session:
    return connect(address, _IDENTITY, timeout_s=_TIMEOUT_S)


def _commit_prompt(address: str) -> None:
    with _connect(address) as session:
        lease = session.acquire(_NAMESPACE, b"", reserve_pages=PREFIX_PAGES)
        lease.commit(_prompt(), lease.reserved_pages)
        lease.release()


def _acquire(session: Session, prompt: bytes, wait_s: float = 0.0) -> float:
    """Milliseconds to acquire the whole prompt."""
    start = time.perf_counter()
    lease = session.acquire(_NAMESPACE, prompt, wait_s=wait_s)
    seconds = time.perf_counter() - start
    assert lease.matched_pages.size == PREFIX_PAGES, "not all of the prompt was found"
    lease.release()
    return seconds * 1e3


def _first_of_sessions(address: str, prompt: bytes) -> list[float]:
    """Milliseconds of the first acquire of every session."""
    milliseconds = []
    for _ in range(_SESSIONS):
        with _connect(address) as session:
            milliseconds.append(_acquire(session, prompt))
    return milliseconds


def _first_of_processes(address: str) -> list[float]:
    """Milliseconds of the first acquire of every process."""
    context = multiprocessing.get_context("spawn")
    milliseconds = []
    for _ in range(_PROCESSES):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_acquire_first, args=(address, theirs))
        process.start()
        theirs.close()
        milliseconds.append(float(ours.recv()))
        process.join()
    return milliseconds


def _acquire_first(address: str, result: Connection) -> None:
    keep_memory_at_hand()
    prompt = _prompt()
    with _connect(address) as session:
        result.send(_acquire(session, prompt))


def _wait_until_pinned() -> float:
    """Seconds until all host memory of the daemon is pinned."""
    start = time.monotonic()
    while time.monotonic() < start + _TIMEOUT_S:
        with urllib.request.urlopen(f"http://{_METRICS}/metrics") as response:
            lines = response.read().decode().splitlines()
        if any(line.startswith("kvtier_host_pinned_bytes") and _is_all(line) for line in lines):
            return time.monotonic() - start
        time.sleep(0.02)
    raise ConfigurationError("host memory was not pinned in time; look at the limit of locked memory (ulimit -l)")


def _is_all(line: str) -> bool:
    return float(line.split()[-1]) == _HOST_PAGES * PREFIX_PAGE_BYTES


def measure_acquire(gpu: Gpu, bare_ms: float) -> dict[str, Any]:
    """Figures; `bare_ms` is what a bare copy of the prefix takes."""
    assert _IDENTITY.layout.page_bytes == PREFIX_PAGE_BYTES
    settings = {
        "device": gpu.uuid,
        "device_bytes": _DEVICE_PAGES * PREFIX_PAGE_BYTES,
        "host_bytes": _HOST_PAGES * PREFIX_PAGE_BYTES,
        "redis": "none",
        "metrics": _METRICS,
    }
    prompt = _prompt()
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-bench-") as directory,
        daemon_process(Path(directory), **settings) as daemon,
    ):
        writer = multiprocessing.get_context("spawn").Process(target=_commit_prompt, args=(daemon.address,))
        start = time.perf_counter()
        writer.start()
        writer.join()
        assert writer.exitcode == 0, "the prompt was not committed"
        opened_s = time.perf_counter() - start
        beside_pinning_ms = _first_of_sessions(daemon.address, prompt)
        pinned_s = _wait_until_pinned()
        first_ms = _first_of_sessions(daemon.address, prompt)
        process_ms = _first_of_processes(daemon.address)
        with _connect(daemon.address) as session:
            promoted_ms = [_promoted(session, prompt) for _ in range(_ROUNDS)]
    return {
        "acquire_128k_resident_very_first_ms": beside_pinning_ms[0],
        "acquire_128k_resident_beside_pinning_ms": statistics.median(beside_pinning_ms),
        "acquire_128k_resident_first_of_session_ms": statistics.median(first_ms),
        "acquire_128k_resident_first_of_process_ms": statistics.median(process_ms),
        "acquire_128k_from_host_ms": statistics.median(promoted_ms),
        "acquire_128k_from_host_over_bare": statistics.median(promoted_ms) / bare_ms,
        "acquire_128k_from_host_rounds_ms": [round(value, 1) for value in promoted_ms],
        "pools_opened_and_prompt_committed_s": opened_s,
        "pinned_after_that_s": pinned_s,
    }


def _promoted(session: Session, prompt: bytes) -> float:
    """Milliseconds to acquire the prompt after other pages have driven it out of the device."""
    session.acquire(_NAMESPACE, b"", reserve_pages=_DEVICE_PAGES).release()
    return _acquire(session, prompt, wait_s=30.0)
