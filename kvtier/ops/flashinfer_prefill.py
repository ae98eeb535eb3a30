"""Prefill attention by FlashInfer's fa2 kernels: with a sliding window or a soft-cap, which torch's own lacks.

Its first call for a case compiles, with nvcc, unless the package flashinfer-jit-cache brings the case along.
"""

from __future__ import annotations

import torch
from flashinfer import single_prefill_with_kv_cache


def prefill_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax_scale: float,
    sliding_window: int | None,
    logit_softcap: float | None,
) -> torch.Tensor:
    """As `kvtier.ops.prefill_attention`, K and V in the query's dtype."""
    out: torch.Tensor = single_prefill_with_kv_cache(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        causal=True,
        sm_scale=softmax_scale,
        window_left=-1 if sliding_window is None else sliding_window - 1,
        logits_soft_cap=logit_softcap,
        backend="fa2",
    )
    return out
