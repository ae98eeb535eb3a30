"""The figures of one replay, in one flat row: the names are those of `--json`."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from kvtier.pages.layout import PageLayout
from kvtier.replay.simulation import Outcome
from kvtier.tiers.base import Route, Tier


class Machine(NamedTuple):
    """The pools of one configuration, in pages of the modelled model's `layout`, each `shrink_factor` times smaller."""

    layout: PageLayout
    device_pages: int
    host_pages: int
    shrink_factor: int


class Row(NamedTuple):
    """One format at one concurrency. Times and rates are in virtual seconds, bytes those of the modelled model.

    `tokens_findable` is what a cache without end would have found of the same requests. What the daemon moved and
    evicted is None where its metrics were not given.
    """

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
    prefill_share: float
    bytes_device_to_host: int | None
    bytes_host_to_device: int | None
    bytes_host_to_redis: int | None
    bytes_redis_to_host: int | None
    evicted_device_pages: int | None
    evicted_host_pages: int | None
    dropped_pages: int | None


def row_of(machine: Machine, concurrency: int, outcome: Outcome, counters: Counter[str] | None) -> Row:
    """The row of a replay; `counters` are those of `read_counters`, counted from its start."""
    served = outcome.served
    asked = sum(request.prompt_tokens for request in served)
    device, host, redis = (sum(request.found[tier] for request in served) for tier in range(3))
    findable = sum(request.findable_tokens for request in served)
    output = sum(request.output_tokens for request in served)
    times = [request.first_token_s for request in served]
    median, p90, p99 = np.percentile(times, [50, 90, 99]).tolist() if times else (0.0, 0.0, 0.0)
    duration_s = max(outcome.end_s, 1e-9)

    def moved(route: Route) -> int | None:
        return None if counters is None else counters[route] * machine.shrink_factor

    def evicted(kind: str) -> int | None:
        return None if counters is None else counters[kind]

    return Row(
        format=machine.layout.page_format.value,
        concurrency=concurrency,
        device_pages=machine.device_pages,
        host_pages=machine.host_pages,
        page_bytes=machine.layout.page_bytes,
        page_size=machine.layout.page_size,
        shrink_factor=machine.shrink_factor,
        sessions=outcome.num_sessions,
        requests=len(served),
        requests_refused=outcome.num_refused,
        tokens_requested=asked,
        tokens_found_device=device,
        tokens_found_host=host,
        tokens_found_redis=redis,
        tokens_recomputed=asked - device - host - redis,
        tokens_left_below=sum(request.left_tokens for request in served),
        tokens_findable=findable,
        hit_rate=(device + host + redis) / max(asked, 1),
        hit_rate_device=device / max(asked, 1),
        hit_rate_findable=findable / max(asked, 1),
        first_token_mean_s=float(np.mean(times)) if times else 0.0,
        first_token_median_s=median,
        first_token_p90_s=p90,
        first_token_p99_s=p99,
        duration_s=outcome.end_s,
        requests_per_s=len(served) / duration_s,
        tokens_per_s=(asked + output) / duration_s,
        output_tokens_per_s=output / duration_s,
        prefill_share=outcome.prefill_s / duration_s,
        bytes_device_to_host=moved(Route.DEVICE_TO_HOST),
        bytes_host_to_device=moved(Route.HOST_TO_DEVICE),
        bytes_host_to_redis=moved(Route.HOST_TO_REDIS),
        bytes_redis_to_host=moved(Route.REDIS_TO_HOST),
        evicted_device_pages=evicted(Tier.DEVICE),
        evicted_host_pages=evicted(Tier.HOST),
        dropped_pages=evicted("dropped"),
    )
