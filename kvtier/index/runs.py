"""Runs of pages that move together, and what became of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvtier.index.pool import NO_SLOT, SlotArray
from kvtier.index.radix import BoolArray, Cursor, Segment


class PageRun(NamedTuple):
    """Consecutive pages `first_page` to `cursor.depth` of a path, chosen for a move, with their slots at that time."""

    cursor: Cursor
    first_page: int
    device: SlotArray
    host: SlotArray
    keys: list[bytes]
    stored: BoolArray

    @property
    def num_pages(self) -> int:
        return self.cursor.depth - self.first_page

    @property
    def namespace(self) -> str:
        return self.cursor.node.namespace


class Published(NamedTuple):
    """What became of slots that were offered to the tree: `taken` marks those it owns now."""

    end: Cursor
    taken: BoolArray
    segments: list[Segment]


class Removed(NamedTuple):
    """Numbers of pages: freed on the device and in host memory, and kept because they are held or precede held ones."""

    device: int
    host: int
    kept: int


def fill(column: SlotArray, slots: SlotArray) -> BoolArray:
    """Puts `slots` into the view `column` where it has none; returns which were put."""
    empty: BoolArray = column == NO_SLOT
    column[empty] = slots[empty]
    return empty


def trailing(mask: BoolArray) -> int:
    """How many of the last entries are all true."""
    false = np.flatnonzero(~mask)
    return int(mask.size - (false[-1] + 1 if false.size else 0))
