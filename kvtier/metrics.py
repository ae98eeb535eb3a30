"""Every metric of the daemon, in one registry. Counters only grow; gauges are read from the parts at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_RPC_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Gauge(NamedTuple):
    """One reading: metric name, help, labels and value."""

    name: str
    documentation: str
    labels: dict[str, str]
    value: float


class Metrics:
    """The metrics of one daemon."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, documentation: str, *labels: str) -> Counter:
            return Counter(f"kvtier_{name}", documentation, labels, registry=self.registry)

        self.tokens_asked = counter("tokens_asked", "Tokens of prompts in Acquire.")
        self.tokens_found = counter("tokens_found", "Tokens of matched pages, by the tier they were found in.", "tier")
        self.tokens_left = counter(
            "tokens_left", "Tokens known below the device that an Acquire did not get, by tier.", "tier"
        )
        self.transfer_pages = counter(
            "transfer_pages",
            "Pages by route and outcome: moved, missing, corrupt, failed, full.",
            "route",
            "outcome",
        )
        self.transfer_bytes = counter("transfer_bytes", "Bytes of pages moved, by route.", "route")
        self.transfer_seconds = counter("transfer_seconds", "Seconds that transfers took, by route.", "route")
        self.evictions = counter(
            "evictions",
            "Pages that left a tier: to the next one (spilled), with a copy elsewhere (copied), or for good (dropped).",
            "tier",
            "outcome",
        )
        self.committed_pages = counter("committed_pages", "Pages committed by workers: new or duplicate.", "outcome")
        self.writes_skipped = counter("writes_skipped", "Pages not written through because the queue was full.")
        self.sessions_lost = counter("sessions_lost", "Sessions that ended with leases open.")
        self.loop_restarts = counter("loop_restarts", "Background loops that died and were started again.", "loop")
        self.rpc_errors = counter("rpc_errors", "Requests refused or failed, by gRPC status.", "method", "status")
        self.rpc_seconds = Histogram(
            "kvtier_rpc_seconds", "Time to answer, by method.", ["method"], buckets=_RPC_BUCKETS, registry=self.registry
        )

    def add_gauges(self, read: Callable[[], Iterable[Gauge]]) -> None:
        """Reads more gauges at each scrape."""
        self.registry.register(_GaugeCollector(read))


class _GaugeCollector(Collector):
    def __init__(self, read: Callable[[], Iterable[Gauge]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for name, documentation, labels, value in self._read():
            family = families.setdefault(name, GaugeMetricFamily(f"kvtier_{name}", documentation, labels=list(labels)))
            family.add_metric(list(labels.values()), value)
        yield from families.values()
