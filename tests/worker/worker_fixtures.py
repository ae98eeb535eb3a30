"""A daemon for the tests of the worker, and workers on it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tiny_models import PAGE_SIZE, tiny_model

from kvtier.launch import DaemonProcess, daemon_process
from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import PLAIN, Recipe
from kvtier.worker import PrefillAttends, Worker, WorkerOptions, connect_worker

StartWorker = Callable[..., Worker]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="session")
def daemon() -> Iterator[DaemonProcess]:
    """One daemon for the tests of the worker, without Redis; each model and format has a cache, each test a tenant."""
    settings = {"device_bytes": 128 << 20, "host_bytes": 32 << 20, "max_caches": 32, "redis": "none"}
    with tempfile.TemporaryDirectory(prefix="kvtier-") as name, daemon_process(Path(name), **settings) as process:
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
            timeout_s: float = 10.0,
            recipe: Recipe = PLAIN,
            **options: object,
        ) -> Worker:
            worker_options = WorkerOptions(prefill_attends=attends, **{"max_sequences": 8, **options})
            model = tiny_model(architecture)
            return stack.enter_context(
                connect_worker(address, model, page_format, PAGE_SIZE, worker_options, timeout_s, recipe)
            )

        yield start
