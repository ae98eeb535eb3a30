"""The public operations: each call goes to the implementation that `dispatch` chooses for its tensors.

On a GPU nothing is read back, unless the torch reference or FlashInfer was chosen: then bad slots, page numbers and
lengths cannot be refused, and it is the caller who answers for them.
"""

from __future__ import annotations

import torch

from kvtier.ops import dispatch, torch_prefill
from kvtier.ops.cuda.workspace import DecodeWorkspace
from kvtier.ops.dispatch import Implementation, platform_of
from kvtier.ops.reference import append, attention, gather
from kvtier.ops.reference import transform as transforms
from kvtier.ops.reference.attention import AttentionResult, OpenPages
from kvtier.ops.reference.codec import GlobalScales, page_format_of
from kvtier.ops.reference.gather import Workspace
from kvtier.ops.reference.transform import Balance, Matrices, Transform
from kvtier.pages.recipe import BlockScales
from kvtier.pages.views import LayerView


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

    Raises `InvalidRequestError` when shapes disagree or a slot lies outside the pool; nothing is written then. On a GPU
    a token whose slot lies outside the pool is skipped instead.
    """
    choice = dispatch.choose_append(platform_of(key.device), key.dtype, value.dtype)
    if choice.implementation is Implementation.KERNEL:
        from kvtier.ops.cuda import append as cuda_append

        cuda_append.quantize_append(view, key, value, slots, scales, block_scales)
    else:
        append.quantize_append(view, key, value, slots, scales, block_scales)


def transform_keys(key: torch.Tensor, transform: Transform) -> torch.Tensor:
    """What pages and open pages hold for `key`, `(N, Hkv, D)`: the same shape and dtype."""
    return _transformed(key, transform, transform.key)


def transform_queries(query: torch.Tensor, transform: Transform) -> torch.Tensor:
    """What attends to transformed keys in the place of `query`, `(N, Hq, D)`: the same shape and dtype."""
    return _transformed(query, transform, transform.query)


def _transformed(values: torch.Tensor, transform: Transform, side: torch.Tensor) -> torch.Tensor:
    """`values` by the factors or matrices of K or of Q."""
    match transform:
        case Matrices():
            return _multiplied(values, side)
        case Balance():
            return _balanced(values, side)


def _balanced(values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    choice = dispatch.choose_balance(platform_of(values.device), values.dtype, values.shape[-1])
    if choice.implementation is Implementation.KERNEL:
        from kvtier.ops.cuda import balance as cuda_balance

        return cuda_balance.balanced(values, factors)
    return transforms.balanced(values, factors)


def _multiplied(values: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    choice = dispatch.choose_multiply(platform_of(values.device), values.dtype, matrices.dtype, values.shape[-1])
    if choice.implementation is Implementation.KERNEL:
        from kvtier.ops.cuda import multiply as cuda_multiply

        return cuda_multiply.multiplied(values, matrices)
    return transforms.multiplied(values, matrices)


def gather_dequantize(
    view: LayerView,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    scales: GlobalScales,
    workspace: Workspace,
) -> None:
    """Decodes the first `lengths[b]` tokens of every sequence b to rows `starts[b]` and following of `workspace`.

    Other rows stay as they are, so that room for a new chunk can be left behind each prefix.

    Args:
        view: one layer of the pool, of any page format.
        page_table: `(B, max_pages)` int32, each sequence's page numbers in order; those past its length are not read.
            Hand over no wider a table than the longest sequence needs: a GPU starts thread blocks for all of it.
        lengths: `(B,)` int32, tokens of each sequence; 0 is allowed.
        starts: `(B,)` int32, the workspace row of each sequence's first token.
        scales: global scales of this layer.
        workspace: written in place. A float8_e4m3fn workspace holds the values themselves, saturating at 448.

    Raises `InvalidRequestError` when a page lies outside the pool, the table is too short or the workspace too small.
    On a GPU tokens in such pages and rows outside the workspace are skipped instead.
    """
    choice = dispatch.choose_gather(platform_of(workspace.key.device), workspace.key.dtype)
    if choice.implementation is Implementation.KERNEL:
        from kvtier.ops.cuda import gather as cuda_gather

        cuda_gather.gather_dequantize(view, page_table, lengths, starts, scales, workspace)
    else:
        gather.gather_dequantize(view, page_table, lengths, starts, scales, workspace)


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
    """One query for each of B sequences, that of its last token, over the tokens in its pages and in its open page.

    Args:
        query: `(B, Hq, D)`, floating point; Hq is a multiple of the pages' KV heads.
        view: one layer of the pool, of any page format.
        page_table: `(B, max_pages)` int32, each sequence's page numbers in order; those past its length are not read.
        lengths: `(B,)` int32, tokens of each sequence in its pages, its last one included when there is no `tail`.
            No token at all gives zeros and an lse of -inf.
        scales: global scales of this layer.
        tail: the tokens behind those in the pages.
        workspace: scratch of the kernel; see `DecodeWorkspace`. None takes fresh memory for this call alone.

    Raises `InvalidRequestError` when heads do not divide, a page lies outside the pool or the table is too short. On a
    GPU page numbers and lengths are not checked.
    """
    num_kv_heads, head_dim = view.k_data.shape[1], query.shape[-1]
    attention.check_heads_and_window(query.shape[1], num_kv_heads, sliding_window)
    group = query.shape[1] // num_kv_heads
    case = dispatch.DecodeCase(
        page_format_of(view), head_dim, group, query.dtype, tail is not None, sliding_window is not None
    )
    choice = dispatch.choose_decode(platform_of(query.device), case)
    pages = (query, view, page_table, lengths, scales, softmax_scale, sliding_window, logit_softcap)
    match choice.implementation:
        case Implementation.KERNEL:
            from kvtier.ops.cuda import decode as cuda_decode

            return cuda_decode.decode_attention(*pages, tail, workspace)
        case Implementation.FLASHINFER:
            from kvtier.ops import flashinfer_fa2

            return flashinfer_fa2.decode_attention(*pages, tail)
        case _:
            return attention.decode_attention(*pages, tail)


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

    Raises `InvalidRequestError` when heads do not divide or S exceeds T.
    """
    attention.check_prefill(query, key, sliding_window)
    case = dispatch.PrefillCase(query.shape[-1], query.dtype, sliding_window is not None, logit_softcap is not None)
    choice = dispatch.choose_prefill(platform_of(query.device), case)
    key, value = key.to(query.dtype), value.to(query.dtype)
    match choice.implementation:
        case Implementation.TORCH:
            return torch_prefill.prefill_attention(query, key, value, softmax_scale)
        case Implementation.FLASHINFER:
            from kvtier.ops import flashinfer_prefill

            return flashinfer_prefill.prefill_attention(query, key, value, softmax_scale, sliding_window, logit_softcap)
        case _:
            return attention.prefill_attention(query, key, value, softmax_scale, sliding_window, logit_softcap)
