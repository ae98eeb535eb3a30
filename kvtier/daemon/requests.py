"""What every request goes through: conversion, measurement, and errors as gRPC statuses."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator

from kvtier.cache import Prompt
from kvtier.errors import DaemonError, InvalidRequestError, KvtierError
from kvtier.metrics import Metrics
from kvtier.pages.chain import extras_by_page
from kvtier.results import TokensByTier
from kvtier.v1 import cache_pb2 as pb

_log = logging.getLogger(__name__)

MAX_WAIT_S = 60.0


def prompt_from(
    namespace: str,
    tokens: bytes,
    extra_keys: Iterable[pb.ExtraKey],
    page_size: int,
    prefill_tokens_per_second: float = 0.0,
) -> Prompt:
    """A prompt from the fields that Acquire, Lookup, Prefetch and Pin share."""
    if not prefill_tokens_per_second >= 0:
        raise InvalidRequestError(
            f"prefill_tokens_per_second is {prefill_tokens_per_second}; send what the worker computes, or 0"
        )
    extras = extras_by_page(((extra.token_position, extra.digest) for extra in extra_keys), page_size)
    return Prompt(namespace, tokens, extras, prefill_tokens_per_second)


def wait_seconds(wait_ms: int) -> float:
    """The wait of an Acquire; raises `InvalidRequestError` when it is longer than the daemon waits."""
    if wait_ms > MAX_WAIT_S * 1000:
        raise InvalidRequestError(f"wait_ms is {wait_ms}; wait at most {MAX_WAIT_S * 1000:.0f}")
    return wait_ms / 1000


def tokens_message(tokens: TokensByTier) -> pb.TokensByTier:
    """Tokens by tier as they travel."""
    return pb.TokensByTier(device=tokens.device, host=tokens.host, redis=tokens.redis)


@contextlib.contextmanager
def measured(method: str, metrics: Metrics) -> Iterator[None]:
    """Times a request and counts its failure. A fault that nobody foresaw is logged and leaves as `DaemonError`."""
    start = time.perf_counter()
    try:
        yield
    except KvtierError as error:
        metrics.rpc_errors.labels(method, error.status.name).inc()
        raise
    except Exception as error:  # a process's edge: the client gets an answer, the log has the trace
        _log.exception("%s failed", method)
        metrics.rpc_errors.labels(method, DaemonError("").status.name).inc()
        fault = type(error).__name__
        raise DaemonError(f"{method} failed inside the daemon ({fault}); its log has the details") from error
    finally:
        metrics.rpc_seconds.labels(method).observe(time.perf_counter() - start)
