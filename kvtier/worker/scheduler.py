"""Which tokens the next forward pass computes."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from kvtier.worker.chunk import Chunk
from kvtier.worker.sequence import Sequence


class Planned(NamedTuple):
    """A sequence and the chunk of it that the next forward pass computes."""

    sequence: Sequence
    chunk: Chunk


def plan_step(running: Items[Sequence], max_tokens: int) -> list[Planned]:
    """One token of every sequence that decodes, then prefills in order of arrival until there are `max_tokens`.

    So a long prompt takes several steps, and others go on decoding between them. The result is in the order in which a
    `PackedBatch` takes its chunks.
    """
    planned: list[Planned] = []
    for sequence in sorted(running, key=lambda sequence: sequence.num_remaining > 1):
        if max_tokens > 0:
            chunk = sequence.chunk(max_tokens)
            planned.append(Planned(sequence, chunk))
            max_tokens -= len(chunk.tokens)
    return sorted(planned, key=lambda planned: not planned.chunk.is_decode)
