"""What one forward pass computes of one sequence."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence that a forward pass computes.

    Attributes:
        tokens: they stand at positions `start` and following.
        start: position of the first one.
        pages: page numbers of the sequence, from its first token on.
        open_slot: slot of its open page in the worker's `OpenPageStore`.
        is_shared: the one token of the chunk is computed for its logits alone: its page is shared with others and full,
            so it is read and never written.
    """

    tokens: Items[int]
    start: int
    pages: Items[int]
    open_slot: int
    is_shared: bool = False

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.start + len(self.tokens)

    @property
    def is_decode(self) -> bool:
        """Whether the chunk attends to its pages and its open page where they are."""
        return len(self.tokens) == 1 and self.start > 0
