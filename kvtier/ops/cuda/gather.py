"""`gather_dequantize.cu`: cached prefixes from their pages into one workspace."""

from __future__ import annotations

import numpy as np
import torch

from kvtier.errors import InvalidRequestError
from kvtier.ops.cuda.loader import kernels
from kvtier.ops.cuda.tensors import (
    ACCESS_BYTES,
    check_indices,
    check_scales,
    geometry_of,
    has_aligned_rows,
    num_resident_blocks,
    region_addresses,
    row_strides,
)
from kvtier.ops.cuda.variants import GATHER_THREADS, GatherVariant
from kvtier.ops.reference.codec import GlobalScales
from kvtier.ops.reference.gather import Workspace
from kvtier.pages.views import LayerView

_MAX_PAGES = 65_535  # of a grid, in the dimensions that pages and sequences have


def gather_dequantize(
    view: LayerView,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    scales: GlobalScales,
    workspace: Workspace,
) -> None:
    """As `kvtier.ops.gather_dequantize`: the workspace is bfloat16, float16 or float8_e4m3fn."""
    pool = geometry_of(view)
    key, value = workspace
    if not key.shape == value.shape == (len(key), pool.num_kv_heads, pool.head_dim) or key.dtype is not value.dtype:
        raise InvalidRequestError(
            f"the workspace has K {tuple(key.shape)} {key.dtype} and V {tuple(value.shape)} {value.dtype}; both must "
            f"be (rows, {pool.num_kv_heads}, {pool.head_dim}) of one dtype"
        )
    if not (has_aligned_rows(key) and has_aligned_rows(value)):
        raise InvalidRequestError(f"the rows of a workspace must be dense and start on {ACCESS_BYTES} bytes")
    check_scales(scales)
    num_sequences, max_pages = page_table.shape
    check_indices(num_sequences, page_table=page_table, lengths=lengths, starts=starts)
    if num_sequences == 0 or max_pages == 0:
        return
    if max_pages > _MAX_PAGES or 2 * num_sequences > _MAX_PAGES:
        raise InvalidRequestError(
            f"the page table is {num_sequences} x {max_pages}; a call gathers up to {_MAX_PAGES // 2} sequences of "
            f"{_MAX_PAGES} pages each"
        )
    has_unit_scales = scales == GlobalScales()
    smallest = GatherVariant(pool.page_format, key.dtype, pool.head_dim, pool.page_size, has_unit_scales, values=32)
    resident = num_resident_blocks(key.device, GATHER_THREADS)
    variant = smallest.for_launch(pool.num_kv_heads, 2 * num_sequences * max_pages, resident)
    arguments = (
        *region_addresses(view),
        pool.page_stride_bytes,
        page_table.data_ptr(),
        page_table.stride(0),
        lengths.data_ptr(),
        starts.data_ptr(),
        key.data_ptr(),
        *row_strides(key),
        value.data_ptr(),
        *row_strides(value),
        np.float32(scales.k),
        np.float32(scales.v),
        np.int32(pool.num_kv_heads),
        np.int32(pool.num_pages),
        np.int32(len(key)),
    )
    grid = (variant.blocks_a_side(pool.num_kv_heads), max_pages, 2 * num_sequences)
    kernel = kernels().kernel("gather_dequantize", variant.macros(), key.device)
    kernel.launch(grid, GATHER_THREADS, arguments, overlaps=True)
