"""What an acquire and a commit report, in the daemon and its clients alike."""

from __future__ import annotations

from typing import NamedTuple


class TokensByTier(NamedTuple):
    """Numbers of tokens, by the tier that has or had their pages."""

    device: int = 0
    host: int = 0
    redis: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.redis


class CommitResult(NamedTuple):
    """`committed_tokens` counts from the start of the sequence; duplicates had their tokens in the cache already."""

    committed_tokens: int
    duplicate_pages: int
