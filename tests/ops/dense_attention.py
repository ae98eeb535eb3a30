"""Dense attention in fp64, head by head: the oracle of the attention tests."""

from __future__ import annotations

from typing import NamedTuple

import torch


class DenseAttention(NamedTuple):
    """fp64 output `(S, Hq, D)` and natural-log LSE `(S, Hq)`."""

    out: torch.Tensor
    lse: torch.Tensor


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    softmax_scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
) -> DenseAttention:
    """Attention of `query` `(S, Hq, D)`, the last S of the T tokens in `keys` and `values` `(T, Hkv, D)`."""
    (num_queries, num_heads, _), num_keys = query.shape, len(keys)
    group = num_heads // keys.shape[1]
    hidden = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    for row in range(num_queries):
        position = num_keys - num_queries + row
        hidden[row, position + 1 :] = True
        if sliding_window is not None:
            hidden[row, : max(0, position - sliding_window + 1)] = True
    out = torch.zeros(query.shape, dtype=torch.float64)
    lse = torch.full((num_queries, num_heads), -torch.inf, dtype=torch.float64)
    for head in range(num_heads if num_keys else 0):
        logits = softmax_scale * query[:, head].double() @ keys[:, head // group].double().T
        if logit_softcap is not None:
            logits = logit_softcap * (logits / logit_softcap).tanh()
        weights = logits.exp().masked_fill(hidden, 0)
        lse[:, head] = weights.sum(-1).log()
        out[:, head] = weights @ values[:, head // group].double() / weights.sum(-1, keepdim=True)
    return DenseAttention(out, lse)
