"""Constant transforms of K, with their inverses on Q: every logit stays what it is, and K suits its codes better.

Query head h goes with KV head `h // (Hq / Hkv)`.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch


class Balance(NamedTuple):
    """A factor a channel, then a Walsh-Hadamard transform of the head (D a power of two).

    Shapes: `key` and `query` are factors `(Hkv, D)` fp32. Their products are 1 / D, because the Walsh-Hadamard
    transform of both K and Q multiplies logits by D.
    """

    key: torch.Tensor
    query: torch.Tensor

    @staticmethod
    def of(balance: torch.Tensor) -> Balance:
        """From what K is divided by and Q multiplied with, `(Hkv, D)` fp32, positive."""
        unit = balance.shape[-1] ** -0.5
        return Balance(unit / balance, unit * balance)


class Matrices(NamedTuple):
    """A matrix a KV head, `(Hkv, D, D)` each, fp16 or fp32 and contiguous; K and Q are rows to the left of them."""

    key: torch.Tensor
    query: torch.Tensor


Transform: TypeAlias = Balance | Matrices


def balanced(values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """The Walsh-Hadamard transform of `values * factors`, computed in fp32 and rounded to the dtype of `values`.

    Args:
        values: `(N, H, D)`.
        factors: `(Hkv, D)` fp32; H is a multiple of Hkv.

    Butterflies go from neighbours to halves: with width 1, 2, 4, ..., x[i], x[i + width] become their sum and their
    difference.
    """
    num_tokens, num_heads, head_dim = values.shape
    repeated = factors.repeat_interleave(num_heads // len(factors), dim=0)
    rows = values.float() * repeated
    width = 1
    while width < head_dim:
        first, second = rows.view(num_tokens, num_heads, head_dim // (2 * width), 2, width).unbind(3)
        rows = torch.stack((first + second, first - second), dim=3).view(num_tokens, num_heads, head_dim)
        width *= 2
    return rows.to(values.dtype)


def multiplied(values: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """`values` `(N, H, D)` times the matrix of their KV head, of `matrices` `(Hkv, D, D)`; the dtype of `values`.

    Values are rounded to the dtype of the matrices, and sums in fp32 to that of the values. For fp16 matrices, values
    have to be below 65,520, as queries and keys are; beyond they count as infinite.
    """
    num_tokens, num_heads, head_dim = values.shape
    grouped = values.reshape(num_tokens, len(matrices), num_heads // len(matrices), head_dim)
    product = torch.einsum("nkgd,kde->nkge", grouped.to(matrices.dtype).float(), matrices.float())
    return product.reshape(values.shape).to(values.dtype)
