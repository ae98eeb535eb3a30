"""`decode_attention.cu`: attention straight from packed pages."""

from __future__ import annotations

import functools

import numpy as np
import torch

from kvtier.errors import InvalidRequestError
from kvtier.ops.cuda.loader import kernels
from kvtier.ops.cuda.tensors import (
    PoolGeometry,
    check_indices,
    geometry_of,
    has_aligned_rows,
    num_multiprocessors,
    region_addresses,
)
from kvtier.ops.cuda.variants import DecodeVariant, decode_variant
from kvtier.ops.cuda.workspace import DecodeWorkspace
from kvtier.ops.reference.attention import AttentionResult, OpenPages
from kvtier.ops.reference.codec import GlobalScales
from kvtier.pages.views import LayerView

_WARP_THREADS = 32


@functools.cache
def _variant(head_dim: int, group: int, device: torch.device) -> DecodeVariant:
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]
    return decode_variant(head_dim, group, shared_bytes)


def decode_attention(
    query: torch.Tensor,
    view: LayerView,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    scales: GlobalScales,
    softmax_scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    tail: OpenPages | None = None,
    workspace: DecodeWorkspace | None = None,
) -> AttentionResult:
    """As `kvtier.ops.decode_attention`, of NVFP4 pages and bfloat16 or float16 queries.

    Head dimensions are 64, 128 and 256, with up to 16 query heads a KV head.
    """
    pool = geometry_of(view)
    num_sequences, num_query_heads, _ = query.shape
    check_indices(num_sequences, page_table=page_table, lengths=lengths)
    query = query.contiguous()
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    if num_sequences == 0:
        return AttentionResult(out, lse)
    if workspace is None:
        workspace = DecodeWorkspace(query.device, num_sequences, pool.num_kv_heads)
    elif len(workspace.arrivals) < num_sequences * pool.num_kv_heads:
        raise InvalidRequestError(f"the workspace is too small for {num_sequences} x {pool.num_kv_heads} heads")
    group = num_query_heads // pool.num_kv_heads
    variant = _variant(pool.head_dim, group, query.device)
    k_data, *other_regions = region_addresses(view)
    arguments = (
        query.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        k_data,
        *(np.uint32(region - k_data) for region in other_regions),
        np.uint32(pool.page_stride_bytes),
        page_table.data_ptr(),
        np.int32(page_table.stride(0)),
        lengths.data_ptr(),
        *_tail_arguments(tail, num_sequences, pool),
        workspace.partials.data_ptr(),
        workspace.arrivals.data_ptr(),
        np.int32(num_sequences),
        np.int32(pool.num_kv_heads),
        np.int32(group),
        np.int32(sliding_window or 0),
        np.float32(softmax_scale),
        np.float32(logit_softcap or 0.0),
        np.float32(scales.k),
        np.float32(scales.v),
    )
    macros = variant.macros(query.dtype, pool.page_size)
    kernel = kernels().kernel("decode_attention", macros, query.device, variant.shared_bytes)
    grid = (num_multiprocessors(query.device),)  # a thread block on each
    kernel.launch(grid, variant.num_warps * _WARP_THREADS, arguments, overlaps=True)
    return AttentionResult(out, lse)


def _tail_arguments(tail: OpenPages | None, num_sequences: int, pool: PoolGeometry) -> tuple[int, ...]:
    """Addresses of K, V and lengths, and strides in elements by sequence, token and head; zeros for no tail."""
    if tail is None:
        return (0,) * 6
    key, value = tail.key, tail.value
    check_indices(num_sequences, tail_lengths=tail.lengths)
    shape = (num_sequences, key.shape[1], pool.num_kv_heads, pool.head_dim)
    if not (key.shape == value.shape == shape and key.dtype is value.dtype is torch.bfloat16):
        raise InvalidRequestError(
            f"the open pages have K {tuple(key.shape)} {key.dtype} and V {tuple(value.shape)} {value.dtype}; both must "
            f"be bfloat16 ({num_sequences}, tokens, {pool.num_kv_heads}, {pool.head_dim})"
        )
    if key.stride() != value.stride() or not (has_aligned_rows(key) and has_aligned_rows(value)):
        raise InvalidRequestError("K and V of open pages must have equal strides, and dense rows on 16 bytes")
    return (key.data_ptr(), value.data_ptr(), tail.lengths.data_ptr(), *key.stride()[:3])
