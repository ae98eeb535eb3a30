"""Which bytes a transfer between two pools copies: as few and as long pieces as the slots allow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.index.pool import SlotArray

Offsets = npt.NDArray[np.int64]


class Pieces(NamedTuple):
    """Copies of a transfer, ordered by host offset: bytes from the start of either pool, and lengths in bytes."""

    device: Offsets
    host: Offsets
    num_bytes: Offsets

    def select(self, which: slice | npt.NDArray[np.bool_]) -> Pieces:
        """Some of them."""
        return Pieces(*(part[which] for part in self))


def pieces_of(device_slots: SlotArray, host_slots: SlotArray, page_bytes: int, boundary_bytes: int) -> Pieces:
    """The pieces that copy page `device_slots[i]` from or to page `host_slots[i]`, for all i.

    Pages that are neighbours in both pools, in the same order, are one piece. No piece crosses a multiple of
    `boundary_bytes` of the host pool, so none is longer than that. Slots are distinct.
    """
    order = np.argsort(host_slots, kind="stable")
    device, host = device_slots[order].astype(np.int64), host_slots[order].astype(np.int64)
    continues = (np.diff(device) == 1) & (np.diff(host) == 1)
    first = np.flatnonzero(np.concatenate(([True], ~continues))) if host.size else np.empty(0, dtype=np.int64)
    num_pages = np.diff(first, append=host.size)
    runs = Pieces(device[first] * page_bytes, host[first] * page_bytes, num_pages * page_bytes)
    return _cut(runs, boundary_bytes)


def _cut(runs: Pieces, boundary_bytes: int) -> Pieces:
    """The runs, cut where they cross a multiple of `boundary_bytes` of the host pool."""
    end = runs.host + runs.num_bytes
    first_cell, last_cell = runs.host // boundary_bytes, (end - 1) // boundary_bytes
    counts = last_cell - first_cell + 1
    run = np.repeat(np.arange(counts.size), counts)
    # Number of a piece in its run: what it is in all, less the pieces of the runs before.
    number = np.arange(run.size) - np.repeat(np.cumsum(counts) - counts, counts)
    start = np.maximum(runs.host[run], (first_cell[run] + number) * boundary_bytes)
    stop = np.minimum(end[run], (first_cell[run] + number + 1) * boundary_bytes)
    return Pieces(runs.device[run] + start - runs.host[run], start, stop - start)


def batches_of(pieces: Pieces, first_bytes: int, most_bytes: int) -> Iterator[Pieces]:
    """The pieces in order, in batches: one of about `first_bytes`, each of twice the one before, up to `most_bytes`.

    A batch has less than that and one piece more.
    """
    bounds = [first_bytes]
    total_bytes = int(pieces.num_bytes.sum())
    while bounds[-1] < total_bytes:
        bounds.append(bounds[-1] + min(first_bytes << len(bounds), most_bytes))
    batch = np.searchsorted(bounds, np.cumsum(pieces.num_bytes) - pieces.num_bytes, side="right")
    edges = np.flatnonzero(np.diff(batch, prepend=-1, append=-1))
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        yield pieces.select(slice(start, stop))
