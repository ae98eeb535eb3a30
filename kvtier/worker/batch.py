"""One forward pass over chunks of several sequences, packed in one row, and the attention of its layers.

The three data paths meet here. In every layer the K and V of all new tokens are first quantised into their pages. Then
  - a prefill attends to a workspace: its cached prefix, if there is one, gathered and dequantised, and its own K and V
    behind it as they are; with `PrefillAttends.QUANTIZED`, as the pages give them back;
  - a decode, a chunk of one token behind a prefix, attends to the pages themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np
import torch

from kvtier.ops import (
    GlobalScales,
    Workspace,
    decode_attention,
    gather_dequantize,
    prefill_attention,
    quantize_append,
)
from kvtier.pages.layout import PageLayout
from kvtier.pages.views import LayerView, layer_view
from kvtier.worker.attention import LayerCall
from kvtier.worker.options import PrefillAttends


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence that a forward pass computes.

    `tokens` stand at positions `start` and following; `pages` are the page numbers of the sequence from its first token
    on. Positions before `first_written` lie in pages that others share: they are read and never written.
    """

    tokens: Items[int]
    start: int
    pages: Items[int]
    first_written: int

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.start + len(self.tokens)

    @property
    def is_decode(self) -> bool:
        """Whether the chunk attends to pages alone."""
        return len(self.tokens) == 1 and self.start > 0


class PagedKv(NamedTuple):
    """The device pool as a model's layers see it: its layout, and views and global scales by layer."""

    layout: PageLayout
    views: Items[LayerView]
    scales: Items[GlobalScales]

    @staticmethod
    def of(memory: np.ndarray, layout: PageLayout) -> PagedKv:
        """Views of a pool `(pages, page_bytes)` uint8, with the global scales of the recipe "plain": 1.0."""
        pool = torch.from_numpy(memory)
        layers = range(layout.num_layers)
        return PagedKv(layout, [layer_view(pool, layout, layer) for layer in layers], [GlobalScales() for _ in layers])


class PackedBatch:
    """Chunks of different sequences: decodes stand before prefills, in the given order and in the packed row.

    Attributes:
        input_ids, position_ids: `(1, T)` int64, what the model is called with.
        last_rows: `(chunks,)` int64, the row of the last token of every chunk, where the logits of the next token are.
    """

    def __init__(
        self, chunks: Items[Chunk], pool: PagedKv, prefill_attends: PrefillAttends, dtype: torch.dtype
    ) -> None:
        """`dtype` is that of the model's K and V, and so of the workspace."""
        self._pool = pool
        self._fresh = prefill_attends is PrefillAttends.FRESH
        self.input_ids = torch.tensor([[token for chunk in chunks for token in chunk.tokens]])
        self.position_ids = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks]).unsqueeze(0)
        self.last_rows = torch.tensor([len(chunk.tokens) for chunk in chunks]).cumsum(0) - 1
        self._written = _written_rows(chunks, pool.layout.page_size)

        decodes = [chunk for chunk in chunks if chunk.is_decode]
        prefills = chunks[len(decodes) :]
        self._num_decodes = len(decodes)
        self._decode_pages = _page_table(decodes)
        self._decode_lengths = _int32(chunk.end for chunk in decodes)
        self._prefills = _prefill_rows(prefills, len(decodes))
        self._prefill_pages = _page_table(prefills)
        self._gathered = _int32(chunk.start if self._fresh else chunk.end for chunk in prefills)
        self._starts = _int32(prefill.seen.start for prefill in self._prefills)
        shape = (sum(chunk.end for chunk in prefills), pool.layout.num_kv_heads, pool.layout.head_dim)
        self._workspace = Workspace(torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype))

    def attend(self, call: LayerCall) -> torch.Tensor:
        """See `AttentionBatch`; it writes the K and V of layer `call.layer` to the pages first."""
        view, scales = self._pool.views[call.layer], self._pool.scales[call.layer]
        rows, slots = self._written
        quantize_append(view, call.key[rows], call.value[rows], slots, scales)
        out = torch.empty(call.query.shape, dtype=call.query.dtype)
        if self._num_decodes:
            decodes = slice(self._num_decodes)
            out[decodes] = decode_attention(
                call.query[decodes],
                view,
                self._decode_pages,
                self._decode_lengths,
                scales,
                call.softmax_scale,
                call.sliding_window,
                call.logit_softcap,
            ).out
        if self._prefills:
            gather_dequantize(view, self._prefill_pages, self._gathered, self._starts, scales, self._workspace)
        for prefill in self._prefills:
            out[prefill.rows] = self._attend_prefill(call, prefill)
        return out

    def _attend_prefill(self, call: LayerCall, prefill: _PrefillRows) -> torch.Tensor:
        key, value = self._workspace
        if self._fresh:
            key[prefill.own] = call.key[prefill.rows]
            value[prefill.own] = call.value[prefill.rows]
        return prefill_attention(
            call.query[prefill.rows],
            key[prefill.seen],
            value[prefill.seen],
            call.softmax_scale,
            call.sliding_window,
            call.logit_softcap,
        )


class _PrefillRows(NamedTuple):
    """A prefill: its `rows` of the packed row; in the workspace, all its tokens (`seen`) and the new ones (`own`)."""

    rows: slice
    seen: slice
    own: slice


class _Written(NamedTuple):
    """Rows of the packed row whose K and V are written, and the slots of the pool they go to, both int64."""

    rows: torch.Tensor
    slots: torch.Tensor


def _prefill_rows(prefills: Items[Chunk], first_row: int) -> list[_PrefillRows]:
    placed: list[_PrefillRows] = []
    row, workspace_row = first_row, 0
    for chunk in prefills:
        end = workspace_row + chunk.end
        rows = slice(row, row + len(chunk.tokens))
        placed.append(_PrefillRows(rows, slice(workspace_row, end), slice(workspace_row + chunk.start, end)))
        row, workspace_row = rows.stop, end
    return placed


def _written_rows(chunks: Items[Chunk], page_size: int) -> _Written:
    rows: list[int] = []
    slots: list[int] = []
    row = 0
    for chunk in chunks:
        for position in range(chunk.start, chunk.end):
            if position >= chunk.first_written:
                rows.append(row)
                slots.append(chunk.pages[position // page_size] * page_size + position % page_size)
            row += 1
    return _Written(torch.tensor(rows, dtype=torch.long), torch.tensor(slots, dtype=torch.long))


def _page_table(chunks: Items[Chunk]) -> torch.Tensor:
    """Page numbers `(chunks, most pages)` int32; the entries past a chunk's own pages are 0 and never read."""
    table = torch.zeros((len(chunks), max((len(chunk.pages) for chunk in chunks), default=0)), dtype=torch.int32)
    for row, chunk in zip(table, chunks, strict=True):
        row[: len(chunk.pages)] = torch.tensor(chunk.pages, dtype=torch.int32)
    return table


def _int32(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)
