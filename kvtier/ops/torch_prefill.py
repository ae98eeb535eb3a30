"""Prefill attention by torch's flash attention, on a GPU."""

from __future__ import annotations

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention


def prefill_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """As `kvtier.ops.prefill_attention`, without window and soft-cap, K and V in the query's dtype."""
    queries, keys, values = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    # The last query sees the last key. No mask is made of this: flash attention knows it as a kind of causal attention.
    mask = causal_lower_right(len(query), len(key))
    out = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
    return out[0].transpose(0, 1)
