"""The next token of every decoding sequence, in a batch of fixed size and memory: what a CUDA graph can be captured of.

A `PackedBatch` is made anew for every step and is as large as that needs. A `DecodeBatch` is filled anew instead, and
computes the same: row i is the sequence whose open page is in slot i, so that open pages are attended to where they
are; a row without a sequence writes nothing and attends to nothing. Every step does all that any step may need: the
open pages of all rows are quantised, those that are not full to no place at all.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

import numpy as np
import torch

from kvtier.ops import DecodeTables, FixedDecode, OpenPages, quantize_append
from kvtier.worker.attention import LayerCall
from kvtier.worker.batch import PagedKv, transformed
from kvtier.worker.chunk import Chunk
from kvtier.worker.fixed_inputs import FixedInputs, FixedPageTable
from kvtier.worker.open_pages import OpenPageStore
from kvtier.worker.placement import PlacedChunk, place_chunks

MakeDecode = Callable[[DecodeTables], FixedDecode]


class DecodeBatch:
    """`fill` it, then run the model on it; see `PackedBatch` for the attributes.

    NOTE: nothing may still be reading the inputs of the step before when it is filled again.
    """

    def __init__(
        self,
        num_rows: int,
        max_pages: int,
        pages: PagedKv,
        open_pages: OpenPageStore,
        make_decode: MakeDecode = FixedDecode,
    ) -> None:
        """For sequences with open pages in slots below `num_rows`, of up to `max_pages` each."""
        self.num_rows = num_rows
        self._pages = pages
        self._open_pages = open_pages
        slots_a_row = 1 if open_pages.is_off else pages.layout.page_size
        self._inputs = FixedInputs(num_rows, slots_a_row, open_pages.unread_place, pages.device)
        self._table = FixedPageTable(num_rows, max_pages, pages.device)
        on_device, on_host = self._inputs.on_device, self._inputs.on_host
        self.input_ids = on_device.tokens.unsqueeze(0)
        self.position_ids = on_device.positions.unsqueeze(0)
        self.last_rows = torch.arange(num_rows, device=pages.device)
        self._decode = make_decode(
            DecodeTables(self._table.on_device, on_device.paged_lengths, self._table.on_host, on_host.paged_lengths)
        )

    @property
    def is_capturable(self) -> bool:
        """Whether a graph can be captured of a step, once one has run."""
        return self._decode.is_capturable

    def fill(self, chunks: Items[Chunk]) -> None:
        """Takes the decodes of the next step."""
        self._inputs.clear()
        for placed in place_chunks(chunks, self._open_pages):
            self._place(placed)
            self._table.set(placed.chunk.open_slot, placed.chunk.pages)
        self._inputs.upload()
        self._table.upload()
        self._decode.plan()

    def attend(self, call: LayerCall) -> torch.Tensor:
        """See `AttentionBatch`; it writes the K and V of layer `call.layer` to open pages and pages first."""
        view, recipe = self._pages.views[call.layer], self._pages.recipes[call.layer]
        call = transformed(call, recipe)
        inputs = self._inputs.on_device
        key, value, tail = call.key, call.value, None
        if not self._open_pages.is_off:
            fresh = self._open_pages.rounded(torch.stack((call.key, call.value)))
            self._open_pages.write(call.layer, inputs.places, fresh)
            key, value = self._open_pages.first_slots(call.layer, self.num_rows)
            tail = OpenPages(key.to(torch.bfloat16), value.to(torch.bfloat16), inputs.open_lengths)
            key, value = key.flatten(0, 1), value.flatten(0, 1)
        quantize_append(view, key, value, inputs.slots.flatten(), recipe.scales, recipe.block_scales)
        return self._decode.attend(
            call.query, view, recipe.scales, call.softmax_scale, call.sliding_window, call.logit_softcap, tail
        )

    def _place(self, placed: PlacedChunk) -> None:
        inputs, chunk, page_size = self._inputs.on_host, placed.chunk, self._pages.layout.page_size
        row, before, paged = chunk.open_slot, placed.num_paged_before, placed.num_paged
        inputs.tokens[row], inputs.positions[row] = chunk.tokens[0], chunk.start
        inputs.paged_lengths[row], inputs.open_lengths[row] = paged, chunk.end - paged
        if not (chunk.is_shared or self._open_pages.is_off):
            inputs.places[row] = row * page_size + chunk.start % page_size
        if paged > before:
            first = chunk.pages[before // page_size] * page_size + before % page_size
            inputs.slots[row, : paged - before] = np.arange(first, first + paged - before)
