"""How fast this worker prefills, which decides whether a page is worth moving up from a lower tier."""

from __future__ import annotations

_LEAST_TOKENS = 32  # shorter passes say more about overhead than about prefill
_NEWEST_WEIGHT = 0.3


class PrefillRate:
    """Moving average over forward passes."""

    def __init__(self) -> None:
        self.tokens_per_second = 0.0
        """0 until a pass was long enough to tell."""

    def add(self, num_tokens: int, seconds: float) -> None:
        """Takes a pass that prefilled `num_tokens`, perhaps beside decodes, into account."""
        if num_tokens < _LEAST_TOKENS:
            return
        newest = num_tokens / seconds
        weight = _NEWEST_WEIGHT if self.tokens_per_second else 1.0
        self.tokens_per_second += weight * (newest - self.tokens_per_second)
