"""What a cache without end would have found: the measure of what was lost to eviction."""

from __future__ import annotations

import numpy as np

from kvtier.replay.tokens import Tokens, mix, seed_of


class EndlessCache:
    """Remembers every whole page of every prompt, as a 64-bit hash of the prompt up to its end."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._weights = mix(np.arange(page_size, dtype=np.uint64) + np.uint64(seed_of("weights"))) | np.uint64(1)
        self._known: set[int] = set()

    def prefixes(self, tokens: Tokens) -> list[int]:
        """A hash for each whole page of `tokens`."""
        num_pages = tokens.size // self._page_size
        pages = tokens[: num_pages * self._page_size].reshape(num_pages, self._page_size).astype(np.uint64)
        # Sums wrap around. Each page's own hash is mixed with its place before the running sum joins them.
        hashes = mix(mix(pages @ self._weights) ^ mix(np.arange(num_pages, dtype=np.uint64)))
        prefixes: list[int] = np.cumsum(hashes, dtype=np.uint64).tolist()
        return prefixes

    def find(self, prefixes: list[int]) -> int:
        """Tokens of the longest known prefix."""
        low, high = 0, len(prefixes)  # whoever adds a prefix adds all shorter ones, so the known ones are the first
        while low < high:
            middle = (low + high + 1) // 2
            if prefixes[middle - 1] in self._known:
                low = middle
            else:
                high = middle - 1
        return low * self._page_size

    def add(self, prefixes: list[int]) -> None:
        """Remembers a prompt."""
        self._known.update(prefixes)

    def find_and_add(self, tokens: Tokens) -> int:
        """Tokens of the longest known prefix of a prompt, which is known from now on."""
        prefixes = self.prefixes(tokens)
        found = self.find(prefixes)
        self.add(prefixes)
        return found
