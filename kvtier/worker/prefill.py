"""The attention of the prefills of one forward pass, on workspaces that all layers share."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from itertools import accumulate
from typing import NamedTuple

import torch

from kvtier.ops import GlobalScales, Workspace, gather_dequantize, prefill_attention
from kvtier.pages.layout import PageLayout
from kvtier.pages.views import LayerView
from kvtier.worker.attention import LayerCall
from kvtier.worker.placement import PlacedChunk, Span, int32, page_table
from kvtier.worker.upload import upload


class Prefills:
    """Prefills attend to pages as these give tokens back, then to the open page, then to the tokens that they compute.

    Where a span sees pages that its prefill has filled itself, what they give back takes the place of the tokens as
    they were computed.

    K and V of N tokens are one tensor `(2, N, Hkv, D)` here.
    """

    def __init__(
        self,
        prefills: Items[PlacedChunk],
        spans: Items[Items[Span]],
        layout: PageLayout,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`spans` are those of each prefill; `dtype` and `device` are those of the workspaces."""
        self._prefills = [
            _Prefill(placed, own, placed.num_paged_before // layout.page_size * layout.page_size)
            for placed, own in zip(prefills, spans, strict=True)
        ]
        cached = [placed.num_paged_before for placed in prefills]
        rooms = [placed.chunk.end for placed in prefills]
        self._seen = _Gathered([placed.chunk.pages for placed in prefills], cached, rooms, layout, dtype, device)
        filled_pages = [own.placed.chunk.pages[own.first_filled // layout.page_size :] for own in self._prefills]
        filled = [own.num_filled for own in self._prefills]
        self._filled = _Gathered(filled_pages, filled, filled, layout, dtype, device)

    def attend(
        self, call: LayerCall, view: LayerView, scales: GlobalScales, computed: torch.Tensor, carried: torch.Tensor
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Rows of the packed row and the attention output there, for every prefill; new pages are written already.

        Args:
            call: of one layer.
            view, scales: of that layer's pages.
            computed: K and V of the packed row, as prefills see the tokens that they compute.
            carried: K and V from open pages.
        """
        workspaces = zip(self._seen.gather(view, scales), self._filled.gather(view, scales), strict=True)
        for (placed, spans, first), (seen, filled) in zip(self._prefills, workspaces, strict=True):
            start, num_paged = placed.chunk.start, placed.num_paged_before
            seen[:, num_paged:start] = carried[:, placed.carried]
            seen[:, start:] = computed[:, placed.rows]
            for span in spans:
                seen[:, num_paged : span.num_paged] = filled[:, num_paged - first : span.num_paged - first]
                num_paged = span.num_paged
                rows = slice(placed.row + span.start - start, placed.row + span.end - start)
                yield rows, _attend(call, rows, seen[:, : span.end])


class _Prefill(NamedTuple):
    """A prefill, its spans, and the position of the first token of the first page that it writes to."""

    placed: PlacedChunk
    spans: Items[Span]
    first_filled: int

    @property
    def num_filled(self) -> int:
        """Tokens from `first_filled` on that it sees as its own pages give them back."""
        num_paged = self.spans[-1].num_paged
        return num_paged - self.first_filled if num_paged > self.placed.num_paged_before else 0


class _Gathered:
    """A workspace with the first `lengths[i]` tokens of `pages[i]` at the beginning of `rooms[i]` rows, for every i."""

    def __init__(
        self,
        pages: Items[Items[int]],
        lengths: Items[int],
        rooms: Items[int],
        layout: PageLayout,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._rows = [slice(end - room, end) for room, end in zip(rooms, accumulate(rooms), strict=True)]
        self._page_table, self._lengths, self._starts = upload(
            [page_table(pages), int32(lengths), int32(rows.start for rows in self._rows)], device
        )
        self._tokens = torch.empty((2, sum(rooms), layout.num_kv_heads, layout.head_dim), dtype=dtype, device=device)

    def gather(self, view: LayerView, scales: GlobalScales) -> list[torch.Tensor]:
        """The rows of every sequence `(2, rows, Hkv, D)`: what pages give back, then room."""
        workspace = Workspace(*self._tokens)
        gather_dequantize(view, self._page_table, self._lengths, self._starts, scales, workspace)
        return [self._tokens[:, rows] for rows in self._rows]


def _attend(call: LayerCall, rows: slice, tokens: torch.Tensor) -> torch.Tensor:
    """Attention of the queries in `rows` of the packed row, the last of a sequence with the K and V of `tokens`."""
    key, value = tokens
    return prefill_attention(call.query[rows], key, value, call.softmax_scale, call.sliding_window, call.logit_softcap)
