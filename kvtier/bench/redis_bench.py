"""`kvtier bench redis`: pages to and from Redis, beside a bare socket client that does nothing else.

An embedded Valkey of its own, on a unix socket. Rounds take turns, so that what else the machine does strikes both
clients alike; the figures are medians over rounds. The bare client has as many connections, each with a thread that
sends SET or GET and moves the bytes: no checksum, no deadline, no event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.pages.envelope import PageName
from kvtier.tiers.embedded import EmbeddedRedis
from kvtier.tiers.redis import RedisTier

_NAMESPACE = "bench"
_REDIS_BYTES = 1 << 30
_OPERATIONS = ("put", "get")
_TINY_PAGE_BYTES = 256


class Measured(NamedTuple):
    """One client in one round."""

    gbps: float  # 10^9 bytes a second
    cpu_s_per_gb: float  # of this process, in user and system mode


def run(
    page_bytes: Sequence[int] = (1 << 20, 2 << 20, 4 << 20),
    *,
    rounds: int = 9,
    round_s: float = 0.25,
    num_connections: int = 2,
    pages_in_flight: int = 4,
) -> dict[str, Any]:
    """Measures both clients for every size of a page.

    Returns, apart from one row a size in `sizes`: `put_gbps` and `get_gbps`, the rates at which one page of every size
    is moved; `bare_put_gbps` and `bare_get_gbps`; `put_of_bare` and `get_of_bare`, medians of the ratio within a round;
    `client_cpu_s_per_gb` and `bare_cpu_s_per_gb`, processor time of puts and gets together; `cpu_us_per_call` and
    `bare_cpu_us_per_call`, what a page costs apart from its bytes, measured with tiny ones.
    """
    sizes = [_TINY_PAGE_BYTES, *page_bytes]
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as directory:
        server = EmbeddedRedis.start(Path(directory), _REDIS_BYTES)
        try:
            samples = {
                size: asyncio.run(_measure(server.url, size, rounds, round_s, num_connections, pages_in_flight))
                for size in sizes
            }
        finally:
            server.stop()
    rows = [{"page_bytes": size, **_medians(samples[size])} for size in page_bytes]
    report: dict[str, Any] = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if name.endswith("_gbps"):
            report[name] = sum(page_bytes) / sum(size / rate for size, rate in zip(page_bytes, values, strict=True))
        elif name != "page_bytes":
            report[name] = statistics.mean(values)
    tiny = _medians(samples[_TINY_PAGE_BYTES])
    for name, prefix in (("client_cpu_s_per_gb", ""), ("bare_cpu_s_per_gb", "bare_")):
        report[f"{prefix}cpu_us_per_call"] = tiny[name] * _TINY_PAGE_BYTES / 1000
    settings = {"rounds": rounds, "num_connections": num_connections, "pages_in_flight": pages_in_flight}
    return report | settings | {"sizes": rows}


_Samples = dict[str, list[Measured]]


def _medians(samples: _Samples) -> dict[str, float]:
    row: dict[str, float] = {}
    for operation in _OPERATIONS:
        ours, bare = samples[operation], samples[f"bare_{operation}"]
        row[f"{operation}_gbps"] = statistics.median(sample.gbps for sample in ours)
        row[f"bare_{operation}_gbps"] = statistics.median(sample.gbps for sample in bare)
        row[f"{operation}_of_bare"] = statistics.median(
            mine.gbps / theirs.gbps for mine, theirs in zip(ours, bare, strict=True)
        )
    for name, prefix in (("client", ""), ("bare", "bare_")):
        row[f"{name}_cpu_s_per_gb"] = statistics.mean(
            statistics.median(sample.cpu_s_per_gb for sample in samples[prefix + operation])
            for operation in _OPERATIONS
        )
    return row


async def _measure(
    url: str, size: int, rounds: int, round_s: float, num_connections: int, pages_in_flight: int
) -> _Samples:
    tier = RedisTier.open(url, timeout_s=10.0, num_connections=num_connections)
    pages = [_Page(size) for _ in range(pages_in_flight)]
    for page in pages:
        await tier.put(_NAMESPACE, page.name, page.image)
    path = url.removeprefix("unix://")
    bare = [_BareClient(path, pages[index::num_connections]) for index in range(num_connections)]
    samples: _Samples = {f"{client}{operation}": [] for operation in _OPERATIONS for client in ("", "bare_")}
    for _ in range(1 + rounds):
        for operation in _OPERATIONS:
            samples[operation].append(await _tier_round(tier, pages, operation, round_s))
            samples[f"bare_{operation}"].append(_bare_round(bare, size, operation, round_s))
    for client in bare:
        client.close()
    await tier.close()
    return {name: of_client[1:] for name, of_client in samples.items()}  # the first round warms up


class _Page:
    """A page that is written and read over and over."""

    def __init__(self, size: int) -> None:
        self.name = PageName(os.urandom(32), os.urandom(32), rank=0)
        self.image = memoryview(bytearray(os.urandom(size)))


async def _tier_round(tier: RedisTier, pages: Sequence[_Page], operation: str, round_s: float) -> Measured:
    stopwatch = _Stopwatch()

    async def repeat(page: _Page) -> int:
        count = 0
        while not count or stopwatch.elapsed_s() < round_s:
            if operation == "put":
                await tier.put(_NAMESPACE, page.name, page.image)
            else:
                assert await tier.get(_NAMESPACE, page.name, page.image), "the page was evicted"
            count += 1
        return count

    counts = await asyncio.gather(*map(repeat, pages))
    return stopwatch.measured(sum(counts) * len(pages[0].image))


class _BareClient:
    """A socket that does what moving pages needs, and nothing else. It moves its pages by turns."""

    def __init__(self, path: str, pages: Sequence[_Page]) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._pages = itertools.cycle(pages)
        self._length = b"$%d\r\n" % len(pages[0].image)
        for _ in pages:
            self.put()

    def put(self) -> None:
        page = next(self._pages)
        self._socket.sendall(b"*3\r\n$3\r\nSET\r\n$32\r\n" + page.name.key + b"\r\n" + self._length)
        self._socket.sendall(page.image)
        self._socket.sendall(b"\r\n")
        self._expect(b"+OK\r\n")

    def get(self) -> None:
        page = next(self._pages)
        self._socket.sendall(b"*2\r\n$3\r\nGET\r\n$32\r\n" + page.name.key + b"\r\n")
        self._expect(self._length)
        self._receive(page.image)
        self._expect(b"\r\n")

    def close(self) -> None:
        self._socket.close()

    def _expect(self, reply: bytes) -> None:
        received = bytearray(len(reply))
        self._receive(memoryview(received))
        assert received == reply, f"Redis sent {bytes(received)!r}, not {reply!r}"

    def _receive(self, target: memoryview) -> None:
        while target:
            count = self._socket.recv_into(target)
            assert count, "Redis closed the connection"
            target = target[count:]


def _bare_round(clients: Sequence[_BareClient], page_bytes: int, operation: str, round_s: float) -> Measured:
    stopwatch = _Stopwatch()
    counts = [0] * len(clients)

    def repeat(index: int) -> None:
        move = clients[index].put if operation == "put" else clients[index].get
        while not counts[index] or stopwatch.elapsed_s() < round_s:
            move()
            counts[index] += 1

    threads = [threading.Thread(target=repeat, args=(index,)) for index in range(len(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return stopwatch.measured(sum(counts) * page_bytes)


class _Stopwatch:
    """Time and processor time since it was made."""

    def __init__(self) -> None:
        self._start_s, self._cpu_start_s = time.perf_counter(), time.process_time()

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start_s

    def measured(self, num_bytes: int) -> Measured:
        gigabytes = num_bytes / 1e9
        return Measured(gigabytes / self.elapsed_s(), (time.process_time() - self._cpu_start_s) / gigabytes)
