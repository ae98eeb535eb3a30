"""What a caller asks of a worker, and what it gets back."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvtier.client import TokensByTier
from kvtier.errors import InvalidRequestError, KvtierError
from kvtier.worker.sampling import Sampling


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Args:
        namespace: the tenant, whose pages alone are matched.
        prompt: token ids, at least one.
        max_new_tokens: the reply ends here at the latest.
        stop_tokens: the reply ends behind the first of these, which is its last token.
        sampling: how tokens are chosen; greedily by default.
        extra_keys: digests by token position of what else changes the KV of these tokens.

    Raises `InvalidRequestError` when the prompt is empty or `max_new_tokens` is not positive.
    """

    namespace: str
    prompt: Items[int]
    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    sampling: Sampling = Sampling()
    extra_keys: tuple[tuple[int, bytes], ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InvalidRequestError("the prompt is empty; give at least one token")
        if self.max_new_tokens < 1:
            raise InvalidRequestError(f"max_new_tokens is {self.max_new_tokens}; ask for at least one token")


class FinishReason(StrEnum):
    """Why a reply ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class RequestStatistics(NamedTuple):
    """Where the KV of a request came from, and what it took.

    Attributes:
        prompt_tokens: tokens of the prompt.
        found: tokens of its prefix that the cache had when the request first got a lease, by tier.
        left: tokens behind them that lower tiers had too, and that did not come up for that lease.
        computed_tokens: tokens of the prompt whose K and V were computed; a restart counts them again.
        time_to_first_token_s: from submitting to the first token, queueing included; 0 when there was none.
        decode_s: from the first token to the last.
        restarts: how often the request began anew, because its lease was lost or its pages were needed by older ones.
    """

    prompt_tokens: int
    found: TokensByTier
    left: TokensByTier
    computed_tokens: int
    time_to_first_token_s: float
    decode_s: float
    restarts: int


class Reply(NamedTuple):
    """The end of a request: the generated token ids, and the error that ended it early, if one did."""

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    statistics: RequestStatistics
    error: KvtierError | None = None
