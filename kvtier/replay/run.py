"""`kvtier replay`: the same sessions under every format and concurrency, each on an empty cache."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvtier.client import AsyncSession, Client
from kvtier.errors import InvalidRequestError
from kvtier.launch import daemon_process, free_metrics_address
from kvtier.pages.fingerprint import CacheIdentity
from kvtier.pages.layout import PageFormat
from kvtier.replay.counters import read_counters
from kvtier.replay.geometry import SHRUNK
from kvtier.replay.options import RedisChoice, ReplayOptions
from kvtier.replay.readers import open_trace
from kvtier.replay.rows import Machine, Row, row_of
from kvtier.replay.simulation import Outcome, Simulation
from kvtier.replay.tokens import VOCAB_SIZE
from kvtier.replay.trace import Session
from kvtier.replay.worker import ReplayWorker

_TIMEOUT_S = 60.0  # making room for a long prompt moves many pages


class _Daemon(NamedTuple):
    """Where a daemon answers, and where its metrics are, if that is known."""

    address: str
    metrics: str | None


def replay(options: ReplayOptions, console: Console) -> list[Row]:
    """Replays every configuration; progress goes to `console`.

    Raises `InvalidRequestError` for a trace that cannot be read and for options that make no sense together, before
    anything is started.
    """
    sessions = open_trace(options.workload.trace, options.workload.num_sessions)
    _check(options, len(sessions))
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for page_format, concurrency in itertools.product(options.memory.formats, options.workload.concurrencies):
            task = progress.add_task(f"{page_format}, {concurrency} open at a time, sessions", total=len(sessions))
            advance = functools.partial(progress.advance, task)
            rows.append(_replay_one(options, page_format, concurrency, sessions, advance))
            progress.stop_task(task)
    return rows


def _check(options: ReplayOptions, num_sessions: int) -> None:
    concurrencies = options.workload.concurrencies
    if min(concurrencies) < 1 or max(concurrencies) > num_sessions:
        asked = ", ".join(map(str, concurrencies))
        raise InvalidRequestError(
            f"concurrency is {asked} with {num_sessions} sessions; use 1 to the number of sessions"
        )
    if options.address is None:
        options.memory.check_pools()
    for page_format in options.memory.formats:
        token_bytes = options.memory.geometry.layout(page_format, options.memory.page_size).token_bytes
        options.rates.check_promotion(token_bytes, options.memory.redis != RedisChoice.NONE)


def _replay_one(
    options: ReplayOptions,
    page_format: PageFormat,
    concurrency: int,
    sessions: Sequence[Session],
    advance: Callable[[], None],
) -> Row:
    geometry, page_size = options.memory.geometry, options.memory.page_size
    layout = geometry.layout(page_format, page_size)
    identity = CacheIdentity("replay", "none", VOCAB_SIZE, SHRUNK.layout(page_format, page_size))
    # A name that no replay had before: pages of another one, which Redis may still have, are not found.
    namespace = f"replay-{uuid.uuid4().hex}"

    async def run(address: str) -> Outcome:
        async with await AsyncSession.connect(address, identity, timeout_s=_TIMEOUT_S) as session:
            worker = ReplayWorker(session, namespace)
            simulation = Simulation(worker, options.workload, options.rates, layout.token_bytes)
            return await simulation.run(sessions, concurrency, advance)

    with _daemon(options) as daemon, Client(daemon.address, timeout_s=_TIMEOUT_S) as client:
        before = read_counters(daemon.metrics) if daemon.metrics else None
        try:
            outcome = asyncio.run(run(daemon.address))
            counters = read_counters(daemon.metrics) - before if daemon.metrics and before is not None else None
            cache = next(item for item in client.statistics().caches if item.fingerprint == identity.fingerprint)
        finally:
            client.flush_namespace(namespace)
    machine = Machine(layout, cache.device.pages, cache.host.pages, geometry.shrink_factor)
    return row_of(machine, concurrency, outcome, counters)


@contextlib.contextmanager
def _daemon(options: ReplayOptions) -> Iterator[_Daemon]:
    """The daemon that was named, or one of its own with the pools that were asked for, shrunk."""
    if options.address is not None:
        yield _Daemon(options.address, options.metrics)
        return
    memory, metrics = options.memory, free_metrics_address()
    settings = {
        "device_bytes": memory.device_bytes // memory.geometry.shrink_factor,
        "host_bytes": memory.host_bytes // memory.geometry.shrink_factor,
        "redis": memory.redis,
        "metrics": metrics,
        "log_level": "warning",
    }
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-replay-") as folder,
        daemon_process(Path(folder), **settings) as daemon,
    ):
        yield _Daemon(daemon.address, metrics)
