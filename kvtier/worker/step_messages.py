"""How rank 0 tells the other ranks what to compute.

A step names the pages of a sequence that the other ranks do not know yet, not all of them: a long sequence has
thousands, and most steps add none.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

import msgpack

from kvtier.worker.chunk import Chunk


class Step(NamedTuple):
    """The chunks of one forward pass; without any, the question whether a rank has the pool.

    Attributes:
        pool_id: of the pool that their pages are of.
        valid_until_s: of the machine's monotonic clock: when their leases run out.
    """

    pool_id: str
    valid_until_s: float
    chunks: list[Chunk]


class StepEncoder:
    """Writes steps, each in the knowledge of those before."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Items[int], int]] = {}  # by open slot: pages, and how many were told

    def encode(self, step: Step) -> bytes:
        """The step for a `StepDecoder` that has read all steps before.

        NOTE: the same sequence of page numbers may have become longer since it was told, and nothing else.
        """
        chunks = [self._fields(chunk) for chunk in step.chunks]
        encoded: bytes = msgpack.packb((step.pool_id, step.valid_until_s, chunks))
        return encoded

    def _fields(self, chunk: Chunk) -> tuple[object, ...]:
        known, count = self._known.get(chunk.open_slot, ((), 0))
        first = count if known is chunk.pages else 0
        self._known[chunk.open_slot] = (chunk.pages, len(chunk.pages))
        return list(chunk.tokens), chunk.start, first, list(chunk.pages[first:]), chunk.open_slot, chunk.is_shared


class StepDecoder:
    """Reads what a `StepEncoder` writes, in the same order."""

    def __init__(self) -> None:
        self._pages: dict[int, list[int]] = {}

    def decode(self, encoded: bytes) -> Step:
        pool_id, valid_until_s, chunks = msgpack.unpackb(encoded)
        return Step(pool_id, valid_until_s, [self._chunk(*fields) for fields in chunks])

    def _chunk(
        self, tokens: list[int], start: int, first: int, pages: list[int], open_slot: int, is_shared: bool
    ) -> Chunk:
        if first == 0:
            self._pages[open_slot] = []
        own = self._pages[open_slot]
        own += pages
        return Chunk(tokens, start, own, open_slot, is_shared)
