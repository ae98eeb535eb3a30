"""What a replay is asked to do: the load, the memory for pages, and the speed of a modelled machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from pydantic import ByteSize, TypeAdapter, ValidationError

from kvtier.errors import InvalidRequestError
from kvtier.pages.layout import PageFormat, PageLayout
from kvtier.results import TokensByTier

T = TypeVar("T")

_MIN_PAGES = 16  # of a daemon's pool


class RedisChoice(StrEnum):
    """The far tiers that need no address."""

    NONE = "none"
    EMBEDDED = "embedded"


@dataclass(frozen=True)
class Workload:
    """Who asks for what.

    Args:
        trace: file of sessions; see `kvtier.replay.readers`.
        num_sessions: the first so many are replayed.
        concurrencies: how many sessions are open at a time, one replay each.
        think_time_scale: recorded think times are multiplied by it.
        start_interval_s: between the starts of the first sessions, which would all come at once otherwise.
        keep_every: every so many tokens of prompts and replies one is kept, for a model with a small context. What two
            prompts have in common shrinks as they do.
        duration_s: seconds, by the clock of this machine, for which the sessions are begun again and again, in every
            round with other tokens; None replays each once.
    """

    trace: Path
    num_sessions: int = 100
    concurrencies: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    think_time_scale: float = 1.0
    start_interval_s: float = 10.0
    keep_every: int = 1
    duration_s: float | None = None


@dataclass(frozen=True)
class Memory:
    """What each configuration gets to keep pages in.

    Args:
        formats: one replay each, with the same bytes.
        device_bytes, host_bytes: pools, in bytes of the model's pages.
        redis: none, embedded, or a URL; not limited in size.
    """

    formats: tuple[PageFormat, ...] = (PageFormat.NVFP4,)
    device_bytes: int = 80 * 10**9
    host_bytes: int = 256 * 10**9
    redis: str = RedisChoice.NONE

    def check_pools(self, layout_of: Callable[[PageFormat], PageLayout]) -> None:
        """Raises `InvalidRequestError` where the pools of a daemon would be too small for pages of a model."""
        for page_format in self.formats:
            page_bytes = layout_of(page_format).page_bytes
            for name, num_bytes in (("device", self.device_bytes), ("host", self.host_bytes)):
                if num_bytes // page_bytes < _MIN_PAGES:
                    raise InvalidRequestError(
                        f"{num_bytes:,} bytes of {name} memory hold {num_bytes // page_bytes} pages of {page_format}; "
                        f"a pool needs at least {_MIN_PAGES}: give {_MIN_PAGES * page_bytes:,} or more"
                    )


@dataclass(frozen=True)
class Rates:
    """How fast the modelled machine is; see docs/replay.md for what each rate stands for.

    Args:
        prefill_tokens_per_s: of the one GPU, one prompt at a time.
        decode_tokens_per_s: of each sequence.
        host_bytes_per_s: from host memory to the device.
        redis_bytes_per_s: from Redis to host memory.
        half_rate_context: position at which a token takes twice as long as the first, because of attention; None leaves
            the cost of attention out.
    """

    prefill_tokens_per_s: float = 20_000.0
    decode_tokens_per_s: float = 60.0
    host_bytes_per_s: float = 50e9
    redis_bytes_per_s: float = 5e9
    half_rate_context: float | None = None

    def prefill_s(self, start: int, end: int) -> float:
        """Seconds to compute the tokens from `start` to `end` of a prompt.

        The token at position p takes (1 + p / half_rate_context) / prefill_tokens_per_s.
        """
        seconds = (end - start) / self.prefill_tokens_per_s
        if self.half_rate_context is None:
            return seconds
        return seconds * (1 + (start + end) / (2 * self.half_rate_context))

    def decode_s(self, num_tokens: int) -> float:
        """Seconds from the first token to the last."""
        return max(0, num_tokens - 1) / self.decode_tokens_per_s

    def transfer_s(self, found: TokensByTier, token_bytes: int) -> float:
        """Seconds until what was found below the device is there: all of it crosses the link from host memory."""
        from_host = (found.host + found.redis) * token_bytes / self.host_bytes_per_s
        return from_host + found.redis * token_bytes / self.redis_bytes_per_s

    def check_promotion(self, token_bytes: int, has_redis: bool) -> None:
        """Raises `InvalidRequestError` where moving a token takes longer than computing it, which nobody would do."""
        found = TokensByTier(redis=1) if has_redis else TokensByTier(host=1)
        moving_s = self.transfer_s(found, token_bytes)
        if moving_s * self.prefill_tokens_per_s >= 1:
            raise InvalidRequestError(
                f"a token of {token_bytes:,} bytes takes {moving_s * 1e6:.0f} us from {found._fields[found.index(1)]} "
                f"to the device and {1e6 / self.prefill_tokens_per_s:.0f} us to compute: kvtier would leave it there; "
                "replay without this tier, or with a faster link"
            )


@dataclass(frozen=True)
class ReplayOptions:
    """Everything together.

    Args:
        workload, memory: who asks for what, and what pages are kept in.
        address: of a running daemon, whose own pools are used then; None starts one for each configuration.
        metrics: HOST:PORT of that daemon's metrics; without, bytes moved and evictions are not reported.
    """

    workload: Workload
    memory: Memory = Memory()
    address: str | None = None
    metrics: str | None = None


def parse_bytes(text: str) -> int:
    """A number of bytes such as 80GB or 64GiB; raises `InvalidRequestError`."""
    try:
        num_bytes = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError as error:
        raise InvalidRequestError(f"{text!r} is no number of bytes; write 80GB or 64GiB") from error
    return num_bytes


def parse_list(text: str, parse: Callable[[str], T], choices: Sequence[object] = ()) -> tuple[T, ...]:
    """Values by comma, each once, in their order; raises `InvalidRequestError` with the choices."""
    try:
        return tuple(dict.fromkeys(parse(part.strip()) for part in text.split(",")))
    except ValueError as error:
        hint = f"choose from {', '.join(map(str, choices))}" if choices else "write numbers by comma"
        raise InvalidRequestError(f"{text!r}: {error}; {hint}") from error
