"""`balance_heads.cu`: factors and a Walsh-Hadamard transform of every head of K or Q."""

from __future__ import annotations

import numpy as np
import torch

from kvtier.errors import InvalidRequestError
from kvtier.ops.cuda.loader import kernels
from kvtier.ops.cuda.tensors import row_strides, with_aligned_rows
from kvtier.ops.cuda.variants import balance_macros

_THREADS = 256
_VALUES_A_THREAD = 16


def balanced(values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """As `kvtier.ops.reference.transform.balanced`, of bfloat16 or float16 `values` with a head dimension of 16 to 512.

    Raises `InvalidRequestError` when `factors` do not belong to `values`.
    """
    num_tokens, num_heads, head_dim = values.shape
    is_grouped = len(factors) > 0 and num_heads % len(factors) == 0
    if factors.dtype is not torch.float32 or not is_grouped or factors.shape[1:] != (head_dim,):
        raise InvalidRequestError(
            f"factors are {factors.dtype} {tuple(factors.shape)}; {num_heads} heads of {head_dim} need fp32 "
            f"(KV heads, {head_dim})"
        )
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    num_rows = num_tokens * num_heads
    if num_rows == 0:
        return out
    values, factors = with_aligned_rows(values), factors.contiguous()
    arguments = (
        values.data_ptr(),
        *row_strides(values),
        out.data_ptr(),
        factors.data_ptr(),
        np.int32(num_heads),
        np.int32(num_heads // len(factors)),
        num_rows,
    )
    rows_a_block = _THREADS * _VALUES_A_THREAD // head_dim
    kernel = kernels().kernel("balance_heads", balance_macros(values.dtype, head_dim), values.device)
    kernel.launch((-(-num_rows // rows_a_block),), _THREADS, arguments, overlaps=True)
    return out
