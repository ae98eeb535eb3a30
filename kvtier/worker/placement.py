"""Where the tokens of one forward pass come from and where they go: rows, slots of pages, places of open pages."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple

import torch

from kvtier.worker.chunk import Chunk
from kvtier.worker.open_pages import OpenPageStore
from kvtier.worker.options import PrefillAttends


class PlacedChunk(NamedTuple):
    """A chunk and where its tokens are.

    Attributes:
        row: of its first token in the packed row.
        num_paged_before, num_paged: tokens of the sequence that are in pages before the pass and after it; those behind
            them are in its open page.
        carried_row, num_carried: its tokens that come out of the open page, since their page becomes full or a prefill
            attends to them, among those of all chunks.
    """

    chunk: Chunk
    row: int
    num_paged_before: int
    num_paged: int
    carried_row: int
    num_carried: int

    @property
    def rows(self) -> slice:
        """Its tokens in the packed row."""
        return slice(self.row, self.row + len(self.chunk.tokens))

    @property
    def carried(self) -> slice:
        """Its tokens among the carried ones."""
        return slice(self.carried_row, self.carried_row + self.num_carried)


class Moves(NamedTuple):
    """What is copied in every layer, as int64 indices.

    Attributes:
        carried: places of the carried tokens; they are read before anything is written.
        written: the tokens that go to pages, as rows of the packed row with the carried tokens behind it.
        slots: of the pool, where they go to.
        kept: rows of the packed row that go to open pages.
        places: where they go to.
    """

    carried: torch.Tensor
    written: torch.Tensor
    slots: torch.Tensor
    kept: torch.Tensor
    places: torch.Tensor


class Span(NamedTuple):
    """Positions `start` to `end - 1` of a prefill, which see the first `num_paged` tokens as pages give them back."""

    start: int
    end: int
    num_paged: int


def place_chunks(chunks: Items[Chunk], open_pages: OpenPageStore) -> list[PlacedChunk]:
    """The chunks of a packed row, in their order."""
    placed: list[PlacedChunk] = []
    row = carried_row = 0
    for chunk in chunks:
        before, behind = (open_pages.num_in_pages(num_tokens) for num_tokens in (chunk.start, chunk.end))
        if chunk.is_shared:
            before = behind = chunk.end
        is_carried = behind > before or not chunk.is_decode
        num_carried = max(0, chunk.start - before) if is_carried else 0
        placed.append(PlacedChunk(chunk, row, before, behind, carried_row, num_carried))
        row += len(chunk.tokens)
        carried_row += num_carried
    return placed


def moves_of(placed: Items[PlacedChunk], page_size: int) -> Moves:
    """The copies of a forward pass."""
    num_rows = sum(len(one.chunk.tokens) for one in placed)
    carried: list[int] = []
    written: list[int] = []
    slots: list[int] = []
    kept: list[int] = []
    places: list[int] = []
    for one in placed:
        chunk, first_place = one.chunk, one.chunk.open_slot * page_size
        # The rows of position 0, were it there: positions before the chunk's come out of the open page.
        own_row, carried_row = one.row - chunk.start, num_rows + one.carried_row - one.num_paged_before
        carried += range(first_place, first_place + one.num_carried)
        for position in range(one.num_paged_before, one.num_paged):
            written.append(position + (own_row if position >= chunk.start else carried_row))
            slots.append(chunk.pages[position // page_size] * page_size + position % page_size)
        for position in range(max(chunk.start, one.num_paged), chunk.end):
            kept.append(own_row + position)
            places.append(first_place + position % page_size)
    return Moves(*(torch.tensor(indices, dtype=torch.long) for indices in (carried, written, slots, kept, places)))


def spans_of(prefill: PlacedChunk, attends: PrefillAttends, page_size: int, open_pages: OpenPageStore) -> list[Span]:
    """The positions of a prefill, cut where what they see changes.

    NOTE: with `PrefillAttends.QUANTIZED` a token sees what it would see were it decoded. The last token of a page makes
    it full, so it sees the whole page as it gives it back, whether the token was cached or not.
    """
    start, end = prefill.chunk.start, prefill.chunk.end
    if attends is PrefillAttends.FRESH:
        return [Span(start, end, prefill.num_paged_before)]
    if open_pages.is_off:
        return [Span(start, end, end)]
    spans: list[Span] = []
    while start < end:
        num_paged = open_pages.num_in_pages(start + 1)
        spans.append(Span(start, min(end, num_paged + page_size - 1), num_paged))
        start = spans[-1].end
    return spans


def page_table(pages: Items[Items[int]]) -> torch.Tensor:
    """Page numbers `(sequences, most pages)` int32; the entries past a sequence's own pages are 0 and never read."""
    table = torch.zeros((len(pages), max((len(own) for own in pages), default=0)), dtype=torch.int32)
    for row, own in zip(table, pages, strict=True):
        row[: len(own)] = int32(own)
    return table


def int32(values: Iterable[int]) -> torch.Tensor:
    """A tensor of int32."""
    return torch.tensor(list(values), dtype=torch.int32)
