"""Quantise the K and V of new tokens into their places in the pages."""

from __future__ import annotations

import torch

from kvtier.errors import InvalidRequestError
from kvtier.ops.codec import GlobalScales, encode
from kvtier.pages.views import LayerView, page_format_of


def quantize_append(
    view: LayerView, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, scales: GlobalScales
) -> None:
    """Writes N tokens of one layer into the pool behind `view`, and no byte beside them.

    Args:
        view: one layer of the pool, of any page format.
        key, value: `(N, Hkv, D)`, floating point.
        slots: `(N,)` int64, `page_number * page_size + offset in the page`, all different.
        scales: global scales of this layer.

    Raises `InvalidRequestError` when shapes disagree or a slot lies outside the pool; nothing is written then.
    """
    num_pages, num_heads, page_size, _ = view.k_data.shape
    if key.shape != value.shape or key.shape[:2] != (len(slots), num_heads):
        raise InvalidRequestError(
            f"key is {tuple(key.shape)}, value {tuple(value.shape)} and slots {tuple(slots.shape)}; "
            f"key and value must be (tokens, {num_heads}, head_dim) with one slot a token"
        )
    num_slots = num_pages * page_size
    if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < num_slots:
        raise InvalidRequestError(f"slots reach from {int(slots.min())} to {int(slots.max())} of 0 to {num_slots - 1}")
    pages, offsets = slots // page_size, slots % page_size
    page_format = page_format_of(view)
    for data, block_scales, values, global_scale in (
        (view.k_data, view.k_scales, key, scales.k),
        (view.v_data, view.v_scales, value, scales.v),
    ):
        encoded = encode(values, page_format, global_scale)
        data[pages, :, offsets] = encoded.data
        block_scales[pages, :, offsets] = encoded.scales
