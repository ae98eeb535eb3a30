"""A daemon with few pages, as fixtures, and a worker on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import PAGE_SIZE, tiny_model
from worker_fixtures import StartWorker

from kvtier.client import Client
from kvtier.launch import DaemonProcess, daemon_process
from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import PLAIN
from kvtier.worker import (
    PrefillAttends,
    Reply,
    Request,
    Worker,
)

FORMAT = PageFormat.NVFP4
IDENTITY = tiny_model("llama").identity(FORMAT, PAGE_SIZE, PrefillAttends.QUANTIZED, recipe=PLAIN)
NUM_PAGES = 24


@pytest.fixture
def settings() -> dict[str, object]:
    """Of a daemon with 24 pages on the device, 16 in host memory, and Redis."""
    page_bytes = IDENTITY.layout.page_bytes
    return {"device_bytes": NUM_PAGES * page_bytes, "host_bytes": 16 * page_bytes, "redis": "embedded", "grace_s": 0.2}


@pytest.fixture
def small_daemon(directory: Path, settings: dict[str, object]) -> Iterator[DaemonProcess]:
    with daemon_process(directory, **settings) as process:
        yield process


@pytest.fixture
def worker(small_daemon: DaemonProcess, start_worker: StartWorker) -> Worker:
    """A worker on the small daemon."""
    return start_worker("llama", FORMAT, PrefillAttends.QUANTIZED, small_daemon.address, patience_s=2.0)


def reference(start_worker: StartWorker, request: Request) -> Reply:
    """The reply where there are pages enough."""
    return start_worker("llama", FORMAT, PrefillAttends.QUANTIZED).generate(request)


def held_pages(address: str) -> int:
    with Client(address) as client:
        (cache,) = client.statistics().caches
    held: int = cache.device.held_pages
    return held
