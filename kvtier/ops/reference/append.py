"""Quantise the K and V of new tokens into their places in the pages."""

from __future__ import annotations

import torch

from kvtier.errors import InvalidRequestError
from kvtier.ops.reference.codec import GlobalScales, encode, page_format_of
from kvtier.pages.recipe import BlockScales
from kvtier.pages.views import LayerView

LEFT_OUT = -1  # the slot of a token that is not written: batches of a fixed size hold such tokens


def quantize_append(
    view: LayerView,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    scales: GlobalScales,
    block_scales: BlockScales = BlockScales.LARGEST,
) -> None:
    """Writes N tokens of one layer into the pool behind `view`, and no byte beside them.

    Args:
        view: one layer of the pool, of any page format.
        key, value: `(N, Hkv, D)`, floating point.
        slots: `(N,)` int64, `page_number * page_size + offset in the page`, all different; -1 for a token that is left
            out.
        scales: global scales of this layer.
        block_scales: how the scales of NVFP4 blocks are chosen.

    Raises `InvalidRequestError` when shapes disagree or a slot lies outside the pool; nothing is written then.
    """
    page_format = page_format_of(view)
    if len(key) == len(value) == len(slots):
        is_written = slots != LEFT_OUT
        key, value, slots = key[is_written], value[is_written], slots[is_written]
    k = encode(key, page_format, scales.k, block_scales)
    v = encode(value, page_format, scales.v, block_scales)
    num_pages, num_heads, page_size, row_length = view.k_data.shape
    if not k.data.shape == v.data.shape == (len(slots), num_heads, row_length):
        raise InvalidRequestError(
            f"key is {tuple(key.shape)}, value {tuple(value.shape)} and slots {tuple(slots.shape)}; key and value must "
            f"be (tokens, {num_heads}, head_dim) with one slot a token and the pages' head_dim"
        )
    num_slots = num_pages * page_size
    if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < num_slots:
        raise InvalidRequestError(f"slots reach from {int(slots.min())} to {int(slots.max())} of 0 to {num_slots - 1}")
    place = (slots // page_size, slice(None), slots % page_size)
    view.k_data[place], view.k_scales[place] = k
    view.v_data[place], view.v_scales[place] = v
