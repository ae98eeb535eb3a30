"""`kvtier replay`: the same sessions under every format and concurrency, each on an empty cache."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvtier.client import Client
from kvtier.daemon.share import lock_owner
from kvtier.errors import InvalidRequestError
from kvtier.launch import daemon_process, free_metrics_address
from kvtier.pages.layout import PageFormat
from kvtier.replay.counters import read_counters
from kvtier.replay.engine import TIMEOUT_S, Attachment, Engine
from kvtier.replay.load import Load
from kvtier.replay.memory_watch import MemoryWatch
from kvtier.replay.options import ReplayOptions
from kvtier.replay.readers import open_trace
from kvtier.replay.rows import Machine, Row, Soak, row_of
from kvtier.replay.tally import Tally
from kvtier.replay.trace import Session
from kvtier.v1 import admin_pb2 as admin

_SETTLE_S = 20.0  # longer than the grace time of what a lost lease had reserved
_POLL_S = 0.2


class _Daemon(NamedTuple):
    """Where a daemon answers, its process, and where its metrics are, as far as that is known."""

    address: str
    pid: int | None
    metrics: str | None


def replay(options: ReplayOptions, engine: Engine, console: Console) -> list[Row]:
    """Replays every configuration; progress goes to `console`.

    Raises `InvalidRequestError` for a trace that cannot be read and for options that make no sense together, before
    anything is started.
    """
    sessions = open_trace(options.workload.trace, options.workload.num_sessions)
    _check(options, engine, len(sessions))
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    total = len(sessions) if options.workload.duration_s is None else None
    with Progress(*columns, console=console) as progress:
        for page_format, concurrency in itertools.product(options.memory.formats, options.workload.concurrencies):
            task = progress.add_task(f"{page_format}, {concurrency} open at a time, sessions", total=total)
            advance = functools.partial(progress.advance, task)
            rows.append(_replay_one(options, engine, page_format, concurrency, sessions, advance))
            progress.stop_task(task)
    return rows


def _check(options: ReplayOptions, engine: Engine, num_sessions: int) -> None:
    concurrencies = options.workload.concurrencies
    if min(concurrencies) < 1 or max(concurrencies) > num_sessions:
        asked = ", ".join(map(str, concurrencies))
        raise InvalidRequestError(
            f"concurrency is {asked} with {num_sessions} sessions; use 1 to the number of sessions"
        )
    if options.address is None:
        options.memory.check_pools(engine.layout)
    engine.check(options.memory)


def _replay_one(
    options: ReplayOptions,
    engine: Engine,
    page_format: PageFormat,
    concurrency: int,
    sessions: Sequence[Session],
    advance: Callable[[], None],
) -> Row:
    layout, duration_s = engine.layout(page_format), options.workload.duration_s
    # A name that no replay had before: pages of another one, which Redis may still have, are not found.
    namespace = f"replay-{uuid.uuid4().hex}"
    tally = Tally()
    with _daemon(options, engine) as daemon, Client(daemon.address, timeout_s=TIMEOUT_S) as client:
        watch = None if duration_s is None else _watch(daemon, engine, duration_s)
        before = read_counters(daemon.metrics) if daemon.metrics else None
        load = Load(sessions, options.workload, concurrency, layout.page_size, advance)
        try:
            with watch or contextlib.nullcontext():
                engine.run(Attachment(daemon.address, page_format, namespace), load, tally)
            counters = read_counters(daemon.metrics) - before if daemon.metrics and before is not None else None
            cache = _cache(client, engine.identity(page_format).fingerprint, _SETTLE_S if watch else 0.0)
        finally:
            client.flush_namespace(namespace)
    machine = Machine(engine.name, layout, cache.device.pages, cache.host.pages, engine.shrink_factor)
    held = cache.leases, cache.device.held_pages, cache.host.held_pages
    soak = Soak(watch.growth(), *held) if watch else None
    return row_of(machine, concurrency, load.num_begun, tally, counters, soak)


def _watch(daemon: _Daemon, engine: Engine, duration_s: float) -> MemoryWatch:
    if daemon.pid is None:
        raise InvalidRequestError(
            f"no process here is known to serve on {daemon.address}; replay it without a duration"
        )
    return MemoryWatch({"daemon": daemon.pid, "worker": os.getpid()}, engine.device, duration_s)


def _cache(client: Client, fingerprint: bytes, timeout_s: float) -> admin.CacheStatistics:
    """What the daemon says of a cache, when nothing of it is held any more or the time is over."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        cache = next(item for item in client.statistics().caches if item.fingerprint == fingerprint)
        is_held = cache.leases or cache.device.held_pages or cache.host.held_pages
        if not is_held or time.monotonic() >= deadline_s:
            return cache
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _daemon(options: ReplayOptions, engine: Engine) -> Iterator[_Daemon]:
    """The daemon that was named, or one of its own with the pools that were asked for, shrunk as the engine's pages."""
    if options.address is not None:
        yield _Daemon(options.address, lock_owner(Path(options.address.removeprefix("unix:"))), options.metrics)
        return
    memory, metrics = options.memory, free_metrics_address()
    settings = {
        "device": engine.device,
        "device_bytes": memory.device_bytes // engine.shrink_factor,
        "host_bytes": memory.host_bytes // engine.shrink_factor,
        "redis": memory.redis,
        "metrics": metrics,
        "log_level": "warning",
    }
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-replay-") as folder,
        daemon_process(Path(folder), **settings) as daemon,
    ):
        yield _Daemon(daemon.address, daemon.process.pid, metrics)
