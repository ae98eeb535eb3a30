"""Decode attention of FP8 and BF16 pages by FlashInfer's fa2 kernels: the fallback formats, and the yardstick.

FlashInfer plans on the host, so a call waits for the GPU and cannot be captured in a CUDA graph. Its first call for a
case compiles, with nvcc, unless the package flashinfer-jit-cache brings the case along.
"""

from __future__ import annotations

import functools
import math

import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper

from kvtier.ops.reference.attention import AttentionResult
from kvtier.ops.reference.codec import GlobalScales, page_format_of
from kvtier.pages.layout import PageFormat
from kvtier.pages.views import LayerView

_WORKSPACE_BYTES = 384 << 20


@functools.cache
def _wrapper(device: torch.device) -> BatchDecodeWithPagedKVCacheWrapper:
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True, backend="fa2")


def decode_attention(
    query: torch.Tensor,
    view: LayerView,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    scales: GlobalScales,
    softmax_scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
) -> AttentionResult:
    """As `kvtier.ops.decode_attention`, without an open page, for pages in FP8 or BF16."""
    num_kv_heads, page_size = view.k_data.shape[1:3]
    num_pages = (lengths + page_size - 1) // page_size
    in_use = torch.arange(page_table.shape[1], device=page_table.device) < num_pages.unsqueeze(1)
    wrapper = _wrapper(query.device)
    wrapper.plan(
        torch.nn.functional.pad(num_pages.cumsum(0, dtype=torch.int32), (1, 0)),
        page_table[in_use],
        (lengths - 1) % page_size + 1,
        num_qo_heads=query.shape[1],
        num_kv_heads=num_kv_heads,
        head_dim=query.shape[-1],
        page_size=page_size,
        q_data_type=query.dtype,
        kv_data_type=view.k_data.dtype,
        sm_scale=softmax_scale,
        window_left=-1 if sliding_window is None else sliding_window - 1,
        logits_soft_cap=logit_softcap,
    )
    multipliers = {"k_scale": scales.k, "v_scale": scales.v} if page_format_of(view) is PageFormat.FP8 else {}
    out, lse = wrapper.run(query.contiguous(), (view.k_data, view.v_data), return_lse=True, **multipliers)
    is_empty = (lengths == 0).unsqueeze(1)  # FlashInfer's lse of no keys is a large number, and its base is 2
    return AttentionResult(
        out.masked_fill(is_empty.unsqueeze(2), 0), (lse * math.log(2)).masked_fill(is_empty, -torch.inf)
    )
