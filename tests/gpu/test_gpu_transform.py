"""The transforms of recipes on the GPU against their references."""

from __future__ import annotations

import pytest
import torch

from kvtier import ops
from kvtier.errors import InvalidRequestError
from kvtier.ops.reference import transform as reference
from kvtier.ops.reference.transform import Balance, Matrices


def _balance(num_kv_heads: int, head_dim: int, generator: torch.Generator) -> Balance:
    shape = (num_kv_heads, head_dim)
    return Balance.of(torch.exp(torch.randn(shape, device=generator.device, generator=generator)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256, 512])
@pytest.mark.parametrize(("num_tokens", "num_kv_heads", "group"), [(1, 1, 1), (64, 8, 8), (333, 3, 5)])
def test_balance_is_the_reference_bit_for_bit(
    device: torch.device, dtype: torch.dtype, head_dim: int, num_tokens: int, num_kv_heads: int, group: int
) -> None:
    generator = torch.Generator(device).manual_seed(0)
    balance = _balance(num_kv_heads, head_dim, generator)
    shape = (num_tokens, num_kv_heads * (group + 2), head_dim)
    fused = torch.randn(shape, device=device, generator=generator).to(dtype)  # Q, K and V of a fused projection
    query, key = fused[:, : num_kv_heads * group], fused[:, num_kv_heads * group : num_kv_heads * (group + 1)]
    for found, values, factors in (
        (ops.transform_queries(query, balance), query, balance.query),
        (ops.transform_keys(key, balance), key, balance.key),
    ):
        assert torch.equal(found, reference.balanced(values, factors))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_logits_stay_what_they_are(device: torch.device, head_dim: int) -> None:
    generator = torch.Generator(device).manual_seed(1)
    query = torch.randn(50, 12, head_dim, device=device, generator=generator).half()
    key = torch.randn(50, 4, head_dim, device=device, generator=generator).half()
    basis, _ = torch.linalg.qr(torch.randn(4, head_dim, head_dim, device=device, generator=generator))
    matrices = Matrices(basis.half().contiguous(), basis.half().contiguous())
    expected = torch.einsum("ngd,ngd->ng", query.double(), key.double().repeat_interleave(3, 1))
    for transform in (_balance(4, head_dim, generator), matrices):
        q, k = ops.transform_queries(query, transform), ops.transform_keys(key, transform)
        found = torch.einsum("ngd,ngd->ng", q.double(), k.double().repeat_interleave(3, 1))
        assert float((found - expected).norm() / expected.norm()) < 5e-4 * head_dim**0.5  # fp16, summed


def test_balance_refuses_factors_of_another_geometry(device: torch.device) -> None:
    query = torch.ones(2, 6, 64, dtype=torch.bfloat16, device=device)
    with pytest.raises(InvalidRequestError, match="need fp32 \\(KV heads, 64\\)"):
        ops.transform_queries(query, Balance.of(torch.ones(4, 64, device=device)))
