"""Attention of one layer: decoding straight from pages, prefill on a workspace, and the merge of partial results.

Query head h attends to KV head `h // (Hq / Hkv)`. Logits are `softmax_scale * q.k`; with a soft-cap c they become
`c * tanh(logit / c)`. With a sliding window w, a query at position p sees the keys at positions `p - w + 1` to p, as in
Hugging Face transformers. Sums are in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvtier.errors import InvalidRequestError
from kvtier.ops.reference.codec import GlobalScales
from kvtier.ops.reference.gather import Workspace, read_tokens
from kvtier.pages.views import LayerView

QUERY_CHUNK = 128  # queries at a time in a prefill: bounds the memory of masks and logits, and skips unseen keys


class AttentionResult(NamedTuple):
    """Attention over some keys of each query.

    Shapes, with queries B and query heads Hq:
        out: `(B, Hq, D)`, dtype of the query; zeros where there was no key.
        lse: `(B, Hq)` fp32, natural logarithm of the sum of exp(logit); -inf where there was no key.
    """

    out: torch.Tensor
    lse: torch.Tensor


class OpenPages(NamedTuple):
    """The newest tokens of each sequence, which are not in pages yet: they follow those that are.

    Shapes, with sequences B, room for T tokens (a page at most), KV heads Hkv:
        key, value: `(B, T, Hkv, D)` bfloat16, with equal strides and dense rows; rows past a length are not read.
        lengths: `(B,)` int32, 0 to T.
    """

    key: torch.Tensor
    value: torch.Tensor
    lengths: torch.Tensor


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
) -> AttentionResult:
    """One query for each of B sequences, that of its last token, over the tokens in its pages and in its open page.

    See `kvtier.ops.decode_attention`. The window counts the tokens of both.
    """
    check_heads_and_window(query.shape[1], view.k_data.shape[1], sliding_window)
    out = torch.zeros_like(query)
    lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float32, device=query.device)
    tail_lengths = [0] * len(query) if tail is None else tail.lengths.tolist()
    for index, (length, tail_length) in enumerate(zip(lengths.tolist(), tail_lengths, strict=True)):
        total = length + tail_length
        if total == 0:
            continue
        first = max(0, total - sliding_window) if sliding_window else 0
        tokens = read_tokens(view, page_table[index], min(first, length), length, scales, torch.float32)
        if tail is not None:
            tokens = _followed_by(tokens, tail, index, slice(max(0, first - length), tail_length))
        keys, values = tokens.key.transpose(0, 1), tokens.value.transpose(0, 1)
        grouped = torch.unflatten(query[index], 0, (len(keys), -1))
        logits = _logits(grouped, keys, softmax_scale, logit_softcap)
        lse[index] = logits.logsumexp(-1).flatten()
        out[index] = (logits.softmax(-1) @ values).flatten(0, 1)
    return AttentionResult(out, lse)


def merge_attention(first: AttentionResult, second: AttentionResult) -> AttentionResult:
    """Attention of the same queries over the keys of both; `out` has the dtype of `first.out`."""
    lse = torch.logaddexp(first.lse, second.lse)
    reference = lse.masked_fill(lse == -torch.inf, 0)  # no key in either: both weights are exp(-inf) = 0, not NaN
    first_weight = (first.lse - reference).exp().unsqueeze(-1)
    second_weight = (second.lse - reference).exp().unsqueeze(-1)
    out = first_weight * first.out.float() + second_weight * second.out.float()
    return AttentionResult(out.to(first.out.dtype), lse)


def open_page_attention(
    query: torch.Tensor, tail: OpenPages, softmax_scale: float, logit_softcap: float | None = None
) -> AttentionResult:
    """The part of `decode_attention` over open pages alone, without a window; it reads nothing back from a GPU."""
    keys, values = (tokens.float().transpose(1, 2) for tokens in (tail.key, tail.value))
    grouped = torch.unflatten(query, 1, (keys.shape[1], -1))
    is_open = torch.arange(keys.shape[2], device=query.device) < tail.lengths.unsqueeze(1)
    logits = _logits(grouped, keys, softmax_scale, logit_softcap).masked_fill(~is_open[:, None, None], -torch.inf)
    lse = logits.logsumexp(-1)
    # NOTE: not softmax, which gives NaN where there is no key; rows past a length may hold anything.
    weights = (logits - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
    out = weights @ values.masked_fill(~is_open[:, None, :, None], 0)
    return AttentionResult(out.flatten(1, 2).to(query.dtype), lse.flatten(1, 2))


def prefill_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax_scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of the last S of T tokens of one sequence: `(S, Hq, D)`, dtype of the query.

    Args:
        query: `(S, Hq, D)`, of the tokens at positions T - S to T - 1.
        key, value: `(T, Hkv, D)`, of any floating dtype; they are cast to the query's.

    Memory beyond inputs and output is at most proportional to Hq * 128 * T.
    Raises `InvalidRequestError` when heads do not divide or S exceeds T.
    """
    num_queries, num_keys = len(query), len(key)
    check_prefill(query, key, sliding_window)
    queries, keys, values = (tensor.to(query.dtype).transpose(0, 1) for tensor in (query, key, value))
    out = torch.empty_like(query)
    for start in range(0, num_queries, QUERY_CHUNK):
        rows = slice(start, min(start + QUERY_CHUNK, num_queries))
        positions = range(num_keys - num_queries + rows.start, num_keys - num_queries + rows.stop)
        seen, mask = _causal_mask(positions, sliding_window, query.device)
        # A batch of one, because torch's fast path on CPU takes four dimensions only.
        q, k, v = queries[None, :, rows], keys[None, :, seen], values[None, :, seen]
        if logit_softcap is None:
            attended = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
        else:
            attended = _capped_attention(q, k, v, mask, softmax_scale, logit_softcap)
        out[rows] = attended[0].transpose(0, 1)
    return out


def check_heads_and_window(num_query_heads: int, num_kv_heads: int, sliding_window: int | None) -> None:
    """Raises `InvalidRequestError` when heads do not divide or a window is empty."""
    if num_query_heads % num_kv_heads:
        raise InvalidRequestError(f"{num_query_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    if sliding_window is not None and sliding_window <= 0:
        raise InvalidRequestError(f"sliding_window is {sliding_window}; it must be positive, or None for no window")


def check_prefill(query: torch.Tensor, key: torch.Tensor, sliding_window: int | None) -> None:
    """Raises `InvalidRequestError` when heads do not divide, a window is empty, or there are more queries than keys."""
    check_heads_and_window(query.shape[1], key.shape[1], sliding_window)
    if len(query) > len(key):
        raise InvalidRequestError(f"{len(query)} queries are more than the {len(key)} tokens that have keys")


def _followed_by(tokens: Workspace, tail: OpenPages, index: int, rows: slice) -> Workspace:
    """`tokens` and, behind them, `rows` of the open page of sequence `index`."""
    key, value = tail.key[index, rows], tail.value[index, rows]
    return Workspace(torch.cat((tokens.key, key.float())), torch.cat((tokens.value, value.float())))


def _logits(query: torch.Tensor, keys: torch.Tensor, softmax_scale: float, logit_softcap: float | None) -> torch.Tensor:
    """Logits `(..., queries, keys)` in fp32 of `query` `(..., queries, D)` and `keys` `(..., keys, D)`."""
    logits = query.float() @ keys.float().transpose(-1, -2) * softmax_scale
    return logits if logit_softcap is None else logit_softcap * torch.tanh(logits / logit_softcap)


def _causal_mask(positions: range, sliding_window: int | None, device: torch.device) -> tuple[slice, torch.Tensor]:
    """The keys that any of the queries at consecutive `positions` sees, and which of them each one sees."""
    seen = slice(max(0, positions.start + 1 - sliding_window) if sliding_window else 0, positions.stop)
    query_positions = torch.arange(positions.start, positions.stop, device=device).unsqueeze(1)
    distance = query_positions - torch.arange(seen.start, seen.stop, device=device)
    mask = distance >= 0
    return seen, mask if sliding_window is None else mask & (distance < sliding_window)


def _capped_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    softmax_scale: float,
    logit_softcap: float,
) -> torch.Tensor:
    """Attention with soft-capped logits, which torch's own cannot do; tensors are as torch's own takes them."""
    grouped = torch.unflatten(queries, 1, (keys.shape[1], -1))
    logits = _logits(grouped, keys.unsqueeze(2), softmax_scale, logit_softcap)
    weights = logits.masked_fill(~mask, -torch.inf).softmax(-1)
    return (weights @ values.float().unsqueeze(2)).flatten(1, 2)
