"""`multiply_heads.cu`: every head of K or Q times the matrix of its KV head."""

from __future__ import annotations

import numpy as np
import torch

from kvtier.errors import InvalidRequestError
from kvtier.ops.cuda.loader import kernels
from kvtier.ops.cuda.tensors import num_multiprocessors, row_strides, with_aligned_rows
from kvtier.ops.cuda.variants import multiply_variant


def multiplied(values: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """As `kvtier.ops.reference.transform.multiplied`, of bfloat16 or float16 `values` and float16 `matrices`.

    Head dimensions are 64, 128 and 256. Sums are in fp32, in an order of the tensor cores' own: a result may be the
    other neighbour of an exact one that lies about halfway between two. It does not depend on the other rows.

    Raises `InvalidRequestError` when `matrices` do not belong to `values`.
    """
    num_tokens, num_heads, head_dim = values.shape
    num_kv_heads = len(matrices)
    is_grouped = num_kv_heads > 0 and num_heads % num_kv_heads == 0
    if matrices.dtype is not torch.float16 or not is_grouped or matrices.shape[1:] != (head_dim, head_dim):
        raise InvalidRequestError(
            f"matrices are {matrices.dtype} {tuple(matrices.shape)}; {num_heads} heads of {head_dim} need fp16 "
            f"(KV heads, {head_dim}, {head_dim})"
        )
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    group = num_heads // num_kv_heads
    num_rows = num_tokens * group  # of a KV head
    if num_rows == 0:
        return out
    if num_rows * group >= 1 << 31:
        raise InvalidRequestError(f"{num_tokens} tokens with {group} heads a KV head are too many for one call")
    values, matrices = with_aligned_rows(values), with_aligned_rows(matrices.contiguous())
    arguments = (
        values.data_ptr(),
        *row_strides(values),
        out.data_ptr(),
        matrices.data_ptr(),
        np.uint32(group),
        -(-(1 << 32) // group),
        np.uint32(num_rows),
    )
    multiprocessors = num_multiprocessors(values.device)
    variant = multiply_variant(head_dim, num_rows * num_kv_heads, multiprocessors)
    kernel = kernels().kernel("multiply_heads", variant.macros(values.dtype), values.device)
    kernel.launch(variant.grid(num_rows, num_kv_heads, multiprocessors), variant.threads, arguments, overlaps=True)
    return out
