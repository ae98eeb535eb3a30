"""What happened to the requests of a replay. Sums, since a replay of hours has more requests than should be kept."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.client import TokensByTier


class Served(NamedTuple):
    """A request that got its first token, `first_token_s` after it arrived.

    `left_tokens` were known below the device and did not come up. `findable_tokens` is what a cache without end would
    have found.
    """

    prompt_tokens: int
    output_tokens: int
    found: TokensByTier
    left_tokens: int
    findable_tokens: int
    first_token_s: float


@dataclass
class Tally:
    """Sums over the requests that were served, and their times to first token.

    Attributes:
        num_refused: requests that can never have the pages they need.
        duration_s: of the replay, in the engine's time.
        prefill_s: how long of it prompts were computed; None where that is not known.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    found: TokensByTier = TokensByTier()
    left_tokens: int = 0
    findable_tokens: int = 0
    first_token_s: array[float] = field(default_factory=lambda: array("d"))
    num_refused: int = 0
    duration_s: float = 0.0
    prefill_s: float | None = None

    def add(self, served: Served) -> None:
        """Counts a request."""
        self.prompt_tokens += served.prompt_tokens
        self.output_tokens += served.output_tokens
        self.found = TokensByTier(*map(sum, zip(self.found, served.found, strict=True)))
        self.left_tokens += served.left_tokens
        self.findable_tokens += served.findable_tokens
        self.first_token_s.append(served.first_token_s)
