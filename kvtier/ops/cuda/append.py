"""`quantize_append.cu`: new tokens into their places in the pages."""

from __future__ import annotations

import numpy as np
import torch

from kvtier.errors import InvalidRequestError
from kvtier.ops.cuda.loader import kernels
from kvtier.ops.cuda.tensors import check_scales, geometry_of, region_addresses, row_strides, with_aligned_rows
from kvtier.ops.cuda.variants import append_macros
from kvtier.ops.reference.codec import GlobalScales
from kvtier.pages.layout import BLOCK_SIZE
from kvtier.pages.recipe import BlockScales
from kvtier.pages.views import LayerView

_MAX_THREADS = 128  # of a thread block


def quantize_append(
    view: LayerView,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    scales: GlobalScales,
    block_scales: BlockScales = BlockScales.LARGEST,
) -> None:
    """As `kvtier.ops.quantize_append`: `key` and `value` have one dtype of bfloat16, float16 and float8_e4m3fn."""
    pool = geometry_of(view)
    num_tokens = len(slots)
    if not key.shape == value.shape == (num_tokens, pool.num_kv_heads, pool.head_dim) or slots.dtype is not torch.int64:
        raise InvalidRequestError(
            f"key is {tuple(key.shape)}, value {tuple(value.shape)} and slots {tuple(slots.shape)} {slots.dtype}; key "
            f"and value must be (tokens, {pool.num_kv_heads}, {pool.head_dim}) with one int64 slot a token"
        )
    check_scales(scales)
    if num_tokens == 0:
        return
    key, value, slots = with_aligned_rows(key), with_aligned_rows(value), slots.contiguous()
    macros = append_macros(key.dtype, pool.page_format, pool.head_dim, pool.page_size, block_scales)
    arguments = (
        key.data_ptr(),
        *row_strides(key),
        value.data_ptr(),
        *row_strides(value),
        slots.data_ptr(),
        *region_addresses(view),
        pool.page_stride_bytes,
        pool.num_pages * pool.page_size,
        np.float32(scales.k),
        np.float32(scales.v),
        np.int32(num_tokens),
    )
    blocks_a_row = pool.head_dim // BLOCK_SIZE
    tokens_a_tile = _MAX_THREADS // blocks_a_row
    grid = (pool.num_kv_heads, -(-num_tokens // tokens_a_tile))
    kernel = kernels().kernel("quantize_append", macros, key.device)
    kernel.launch(grid, tokens_a_tile * blocks_a_row, arguments, overlaps=True)
