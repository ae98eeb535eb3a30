"""The transforms of recipes: what they do to K, and that logits do not notice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtier import ops
from kvtier.ops.reference.transform import Balance, Matrices
from kvtier.pages.recipe import Recipe, RecipeName


def _hadamard(size: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


@pytest.mark.parametrize("head_dim", [16, 64, 256])
def test_balance_is_factors_and_a_hadamard_matrix(head_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    balance = torch.rand(3, head_dim, generator=generator) + 0.5
    key = torch.randn(7, 3, head_dim, generator=generator)
    query = torch.randn(7, 6, head_dim, generator=generator)
    transform = Balance.of(balance)
    unitary = _hadamard(head_dim) / np.sqrt(head_dim)
    expected_key = (key.double().numpy() / balance.double().numpy()) @ unitary
    expected_query = (query.double().numpy() * balance.double().repeat_interleave(2, 0).numpy()) @ unitary
    np.testing.assert_allclose(ops.transform_keys(key, transform).numpy(), expected_key, atol=1e-5)
    np.testing.assert_allclose(ops.transform_queries(query, transform).numpy(), expected_query, atol=1e-5)


@pytest.mark.parametrize("transform", [Balance.of(torch.ones(2, 16)), Matrices(*torch.ones(2, 2, 16, 16))])
def test_no_tokens_are_no_tokens(transform: Balance | Matrices) -> None:
    assert ops.transform_keys(torch.empty(0, 2, 16), transform).shape == (0, 2, 16)
    assert ops.transform_queries(torch.empty(0, 6, 16), transform).shape == (0, 6, 16)


@pytest.mark.parametrize("kind", ["balanced", "full"])
def test_logits_stay_what_they_are(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    layers, heads, head_dim = 2, 3, 32
    if kind == "balanced":
        arrays = {"balance": (torch.rand(layers, heads, head_dim, generator=generator) + 0.5).numpy()}
    else:
        matrices = torch.randn(layers, heads, head_dim, head_dim, generator=generator) + 6 * torch.eye(head_dim)
        arrays = {"key_matrices": matrices.half().numpy()}
    recipe = Recipe(RecipeName(kind), **arrays)
    key = torch.randn(9, heads, head_dim, generator=generator)
    query = torch.randn(9, heads * 4, head_dim, generator=generator)
    expected = torch.einsum("nhd,mhd->nmh", query, key.repeat_interleave(4, 1))
    for layer in ops.layer_recipes(recipe, layers, torch.float32, torch.device("cpu")):
        assert layer.transform is not None
        q, k = ops.transform_queries(query, layer.transform), ops.transform_keys(key, layer.transform)
        assert not torch.allclose(k, key, atol=0.1)
        torch.testing.assert_close(
            torch.einsum("nhd,mhd->nmh", q, k.repeat_interleave(4, 1)), expected, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_matrices_of_a_layer_are_contiguous(dtype: torch.dtype) -> None:
    matrices = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2)) + 6 * torch.eye(16)
    recipe = Recipe(RecipeName.FULL, key_matrices=matrices.half().numpy())
    for layer in ops.layer_recipes(recipe, 2, dtype, torch.device("cpu")):
        assert isinstance(layer.transform, Matrices)
        assert layer.transform.key.is_contiguous() and layer.transform.query.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_is_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(20, 6, 64, generator=generator).to(dtype)
    matrices = torch.randn(2, 64, 64, generator=generator).half()
    exact = (values.double().view(20, 2, 3, 64) @ matrices.double()).view(20, 6, 64)
    found = ops.transform_queries(values, Matrices(matrices, matrices))
    assert found.dtype is dtype
    half_an_ulp = torch.finfo(dtype).eps / 2 * exact.abs()
    assert bool(((found.double() - exact).abs() <= half_an_ulp + 1e-5).all())  # and what sums in fp32 lose


def test_sums_may_be_greater_than_fp16_allows() -> None:
    values = torch.full((1, 1, 16), 60_000.0).bfloat16()
    matrices = torch.ones(1, 16, 16).half()
    assert ops.transform_keys(values, Matrices(matrices, matrices)).tolist() == [[[16 * float(values[0, 0, 0])] * 16]]


def test_matrices_are_of_the_head() -> None:
    matrices = torch.stack([torch.eye(16) * factor for factor in (1.0, 2.0)])
    values = torch.ones(1, 4, 16)
    found = ops.transform_queries(values, Matrices(matrices, matrices))
    assert found[0, :, 0].tolist() == [1, 1, 2, 2]
