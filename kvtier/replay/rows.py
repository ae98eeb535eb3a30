"""The figures of one replay in one row: the names are those of `--json`."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from kvtier.pages.layout import PageLayout
from kvtier.replay.memory_watch import Growth
from kvtier.replay.tally import Tally
from kvtier.tiers.base import Route, Tier


class Machine(NamedTuple):
    """Who served, and the pools of one configuration, in pages of the model's `layout`, each `shrink_factor` times
    smaller.
    """

    worker: str
    layout: PageLayout
    device_pages: int
    host_pages: int
    shrink_factor: int


class Soak(NamedTuple):
    """What a replay for a time left behind: what daemon and worker took, and what was held when all had ended."""

    growth: tuple[Growth, ...]
    leases: int
    held_device_pages: int
    held_host_pages: int

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "growth": [growth._asdict() for growth in self.growth]}


class Row(NamedTuple):
    """One format at one concurrency. Times and rates of a modelled worker are in virtual seconds, bytes the model's.

    `tokens_findable` is what a cache without end would have found of the same requests. What the daemon moved and
    evicted is None where its metrics were not given, `prefill_share` where the worker is real, and `soak` where nobody
    gave a duration.
    """

    worker: str
    format: str
    concurrency: int
    device_pages: int
    host_pages: int
    page_bytes: int
    page_size: int
    shrink_factor: int
    sessions: int
    requests: int
    requests_refused: int
    tokens_requested: int
    tokens_found_device: int
    tokens_found_host: int
    tokens_found_redis: int
    tokens_recomputed: int
    tokens_left_below: int
    tokens_findable: int
    hit_rate: float
    hit_rate_device: float
    hit_rate_findable: float
    first_token_mean_s: float
    first_token_median_s: float
    first_token_p90_s: float
    first_token_p99_s: float
    duration_s: float
    requests_per_s: float
    tokens_per_s: float
    output_tokens_per_s: float
    prefill_share: float | None
    bytes_device_to_host: int | None
    bytes_host_to_device: int | None
    bytes_host_to_redis: int | None
    bytes_redis_to_host: int | None
    evicted_device_pages: int | None
    evicted_host_pages: int | None
    dropped_pages: int | None
    soak: Soak | None

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "soak": self.soak and self.soak.to_json()}


def row_of(
    machine: Machine,
    concurrency: int,
    num_sessions: int,
    tally: Tally,
    counters: Counter[str] | None,
    soak: Soak | None,
) -> Row:
    """The row of a replay; `counters` are those of `read_counters`, counted from its start."""
    asked, times = tally.prompt_tokens, tally.first_token_s
    device, host, redis = tally.found
    median, p90, p99 = np.percentile(times, [50, 90, 99]).tolist() if times else (0.0, 0.0, 0.0)
    duration_s = max(tally.duration_s, 1e-9)

    def moved(route: Route) -> int | None:
        return None if counters is None else counters[route] * machine.shrink_factor

    def evicted(kind: str) -> int | None:
        return None if counters is None else counters[kind]

    return Row(
        worker=machine.worker,
        format=machine.layout.page_format.value,
        concurrency=concurrency,
        device_pages=machine.device_pages,
        host_pages=machine.host_pages,
        page_bytes=machine.layout.page_bytes,
        page_size=machine.layout.page_size,
        shrink_factor=machine.shrink_factor,
        sessions=num_sessions,
        requests=len(times),
        requests_refused=tally.num_refused,
        tokens_requested=asked,
        tokens_found_device=device,
        tokens_found_host=host,
        tokens_found_redis=redis,
        tokens_recomputed=asked - device - host - redis,
        tokens_left_below=tally.left_tokens,
        tokens_findable=tally.findable_tokens,
        hit_rate=(device + host + redis) / max(asked, 1),
        hit_rate_device=device / max(asked, 1),
        hit_rate_findable=tally.findable_tokens / max(asked, 1),
        first_token_mean_s=float(np.mean(times)) if times else 0.0,
        first_token_median_s=median,
        first_token_p90_s=p90,
        first_token_p99_s=p99,
        duration_s=tally.duration_s,
        requests_per_s=len(times) / duration_s,
        tokens_per_s=(asked + tally.output_tokens) / duration_s,
        output_tokens_per_s=tally.output_tokens / duration_s,
        prefill_share=None if tally.prefill_s is None else tally.prefill_s / duration_s,
        bytes_device_to_host=moved(Route.DEVICE_TO_HOST),
        bytes_host_to_device=moved(Route.HOST_TO_DEVICE),
        bytes_host_to_redis=moved(Route.HOST_TO_REDIS),
        bytes_redis_to_host=moved(Route.REDIS_TO_HOST),
        evicted_device_pages=evicted(Tier.DEVICE),
        evicted_host_pages=evicted(Tier.HOST),
        dropped_pages=evicted("dropped"),
        soak=soak,
    )
