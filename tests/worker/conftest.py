"""A daemon for the tests of the worker, and workers on it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tiny_models import PAGE_SIZE, tiny_model

from kvtier.launch import DaemonProcess, daemon_process
from kvtier.pages.layout import PageFormat
from kvtier.worker import PrefillAttends, Worker, WorkerOptions, connect_worker

StartWorker = Callable[..., Worker]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Threads of tiny models that share a core with the daemon wait for each other most of the time."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def short_directory() -> Iterator[Path]:
    """A directory whose path leaves room for the name of a socket."""
    with tempfile.TemporaryDirectory(prefix="kvtier-worker-") as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def daemon(short_directory: Path) -> Iterator[DaemonProcess]:
    """One daemon for the tests of the worker, without Redis: a cache for each model and format, a tenant for each test."""
    settings = {"device_bytes": 128 << 20, "host_bytes": 32 << 20, "max_caches": 32, "redis": "none"}
    with daemon_process(short_directory, **settings) as process:
        yield process


@pytest.fixture
def start_worker(daemon: DaemonProcess) -> Iterator[StartWorker]:
    """Attaches workers for a tiny model to the daemon, or to another `address`; they end with the test."""
    with ExitStack() as stack:

        def start(
            architecture: str = "llama",
            page_format: PageFormat = PageFormat.BF16,
            attends: PrefillAttends = PrefillAttends.FRESH,
            address: str = daemon.address,
            **options: float,
        ) -> Worker:
            worker_options = WorkerOptions(prefill_attends=attends, **{"max_sequences": 8, **options})
            model = tiny_model(architecture)
            return stack.enter_context(connect_worker(address, model, page_format, PAGE_SIZE, worker_options))

        yield start
