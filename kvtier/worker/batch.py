"""One forward pass over chunks of several sequences, packed in one row, and the attention of its layers.

In every layer K and Q are first transformed as the recipe says: pages, open pages and all attention are in the
transformed space, in which logits are what they were. Then
  - the new tokens go to the open pages of their sequences; those of pages that are full now are quantised into them,
    whole pages at once;
  - a decode, a chunk of one token behind a prefix, attends to the pages and the open page where they are;
  - a prefill attends to a workspace (`kvtier.worker.prefill`).
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

import torch

from kvtier.client.pool import PoolMemory
from kvtier.ops import (
    LayerRecipe,
    decode_attention,
    layer_recipes,
    quantize_append,
    transform_keys,
    transform_queries,
)
from kvtier.pages.layout import PageLayout
from kvtier.pages.recipe import Recipe
from kvtier.pages.views import LayerView, layer_view
from kvtier.worker.attention import LayerCall
from kvtier.worker.chunk import Chunk
from kvtier.worker.open_pages import OpenPageStore
from kvtier.worker.options import PrefillAttends
from kvtier.worker.placement import Moves, int32, moves_of, page_table, place_chunks, spans_of
from kvtier.worker.prefill import Prefills
from kvtier.worker.upload import upload


class PagedKv(NamedTuple):
    """The device pool as a model's layers see it: its layout, views and recipe by layer, and the dtype of K and V."""

    layout: PageLayout
    views: Items[LayerView]
    recipes: Items[LayerRecipe]
    dtype: torch.dtype

    @staticmethod
    def of(memory: PoolMemory | torch.Tensor, layout: PageLayout, recipe: Recipe, dtype: torch.dtype) -> PagedKv:
        """Views of a pool `(pages, page_bytes)` uint8, for a model whose K and V have `dtype`."""
        pool = torch.as_tensor(memory)
        views = [layer_view(pool, layout, layer) for layer in range(layout.num_layers)]
        return PagedKv(layout, views, layer_recipes(recipe, layout.num_layers, dtype, pool.device), dtype)

    @property
    def device(self) -> torch.device:
        """Where the pool is."""
        return self.views[0].k_data.device

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return len(self.views[0].k_data)


class PackedBatch:
    """Chunks of different sequences: decodes stand before prefills, in the given order and in the packed row.

    A sequence has one chunk in it at most.

    Attributes:
        input_ids, position_ids: `(1, T)` int64, what the model is called with.
        last_rows: `(chunks,)` int64, the row of the last token of every chunk, where the logits of the next token are.
    """

    def __init__(
        self, chunks: Items[Chunk], pages: PagedKv, open_pages: OpenPageStore, prefill_attends: PrefillAttends
    ) -> None:
        self._pages = pages
        self._open_pages = open_pages
        self._fresh = prefill_attends is PrefillAttends.FRESH

        page_size = pages.layout.page_size
        placed = place_chunks(chunks, open_pages)
        decodes = [one for one in placed if one.chunk.is_decode]
        prefills = placed[len(decodes) :]
        self._num_decodes = len(decodes)
        (
            self.input_ids,
            self.position_ids,
            self.last_rows,
            self._decode_pages,
            self._decode_lengths,
            self._tail_lengths,
            self._tail_slots,
            *moves,
        ) = upload(
            [
                torch.tensor([[token for chunk in chunks for token in chunk.tokens]]),
                torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks]).unsqueeze(0),
                torch.tensor([len(chunk.tokens) for chunk in chunks]).cumsum(0) - 1,
                page_table([decode.chunk.pages for decode in decodes]),
                int32(decode.num_paged for decode in decodes),
                int32(decode.chunk.end - decode.num_paged for decode in decodes),
                torch.tensor([decode.chunk.open_slot for decode in decodes], dtype=torch.long),
                *moves_of(placed, page_size),
            ],
            pages.device,
        )
        self._moves = Moves(*moves)
        spans = [spans_of(prefill, prefill_attends, page_size, open_pages) for prefill in prefills]
        self._prefills = Prefills(prefills, spans, pages.layout, pages.dtype, pages.device) if prefills else None

    def attend(self, call: LayerCall) -> torch.Tensor:
        """See `AttentionBatch`; it writes the K and V of layer `call.layer` to pages and open pages first."""
        view, recipe = self._pages.views[call.layer], self._pages.recipes[call.layer]
        call = transformed(call, recipe)
        fresh = torch.stack((call.key, call.value))
        held = self._open_pages.rounded(fresh)
        carried = self._open_pages.read(call.layer, self._moves.carried).to(held.dtype)
        self._write(call.layer, torch.cat((held, carried), dim=1))
        out = torch.empty(call.query.shape, dtype=call.query.dtype, device=call.query.device)
        if self._num_decodes:
            out[: self._num_decodes] = self._decode(call)
        if self._prefills:
            computed = fresh if self._fresh else held
            for rows, attended in self._prefills.attend(call, view, recipe.scales, computed, carried):
                out[rows] = attended
        return out

    def _write(self, layer: int, tokens: torch.Tensor) -> None:
        """Fills pages and open pages from `tokens` `(2, N, Hkv, D)`: the packed row, then the carried tokens."""
        moves, recipe = self._moves, self._pages.recipes[layer]
        if len(moves.slots):
            key, value = tokens[:, moves.written]
            view = self._pages.views[layer]
            quantize_append(view, key, value, moves.slots, recipe.scales, recipe.block_scales)
        self._open_pages.write(layer, moves.places, tokens[:, moves.kept])

    def _decode(self, call: LayerCall) -> torch.Tensor:
        return decode_attention(
            call.query[: self._num_decodes],
            self._pages.views[call.layer],
            self._decode_pages,
            self._decode_lengths,
            self._pages.recipes[call.layer].scales,
            call.softmax_scale,
            call.sliding_window,
            call.logit_softcap,
            self._open_pages.tail(call.layer, self._tail_slots, self._tail_lengths),
        ).out


def transformed(call: LayerCall, recipe: LayerRecipe) -> LayerCall:
    """`call` with K and Q as pages and attention take them."""
    if recipe.transform is None:
        return call
    key, query = transform_keys(call.key, recipe.transform), transform_queries(call.query, recipe.transform)
    return call._replace(key=key, query=query)
