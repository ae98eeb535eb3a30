"""What is solved for attains its minimum and changes no logit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from calibration_models import MAX_TOKENS, random_texts, seen_calls, small_model

from kvtier.calibrate import Moments, Rotation, rotations_of, solve_recipe
from kvtier.calibrate.hadamard import hadamard
from kvtier.calibrate.solve import balance_of, matrices_of, regular
from kvtier.errors import InvalidRequestError
from kvtier.ops import layer_recipes, transform_keys, transform_queries
from kvtier.pages.recipe import Origin, Recipe, RecipeName

BLOCK = 16
HEAD_DIM = 64


def random_matrix(head_dim: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(2, head_dim, head_dim, dtype=torch.float64, generator=generator)


def random_moments(head_dim: int, seed: int) -> torch.Tensor:
    """Of correlated channels, some of them far larger than others: `(2, D, D)`."""
    generator = torch.Generator().manual_seed(seed)
    channels = random_matrix(head_dim, generator)[:, :1].mul(1.5).exp()
    rows = random_matrix(head_dim, generator) * channels
    return rows.mT @ rows / head_dim


def logit_error(keys: torch.Tensor, queries: torch.Tensor, matrices: torch.Tensor) -> float:
    """The sum over blocks of tr(Sk_block) tr(Sq_block) with `matrices` for keys and their inverses for queries."""
    inverses = torch.linalg.inv(matrices).mT
    energies = [
        (matrix.mT @ moments @ matrix).diagonal(dim1=-2, dim2=-1).unflatten(-1, (-1, BLOCK)).sum(-1)
        for moments, matrix in ((keys, matrices), (queries, inverses))
    ]
    return float((energies[0] * energies[1]).sum())


@pytest.mark.parametrize("head_dim", [48, 64])
def test_matrices_attain_the_least_logit_error(head_dim: int) -> None:
    keys, queries = (regular(random_moments(head_dim, seed)) for seed in (1, 2))
    best = matrices_of(keys, queries).key
    least = logit_error(keys, queries, best)

    # The square of the sum of the singular values of Sk^(1/2) Sq^(1/2), divided by the number of blocks.
    product = torch.linalg.cholesky(keys).mT @ torch.linalg.cholesky(queries)
    bound = torch.linalg.svdvals(product).sum(-1).square().sum() * BLOCK / head_dim
    assert least == pytest.approx(float(bound), rel=1e-9)

    identity = torch.eye(head_dim, dtype=torch.float64).expand_as(keys)
    assert least < 0.5 * logit_error(keys, queries, identity)
    assert least < 0.5 * logit_error(keys, queries, identity @ hadamard(head_dim))
    generator = torch.Generator().manual_seed(3)
    for size in (1e-3, 1e-2, 0.1, 1.0):
        perturbed = best @ (identity + size * random_matrix(head_dim, generator) / head_dim**0.5)
        assert least < logit_error(keys, queries, perturbed)


@pytest.mark.parametrize("head_dim", [48, 64, 80])
def test_transformed_energies_are_equal_in_all_channels(head_dim: int) -> None:
    keys, queries = (regular(random_moments(head_dim, seed)) for seed in (1, 2))
    matrices = matrices_of(keys, queries)
    key_moments = matrices.key.mT @ keys @ matrices.key
    query_moments = matrices.query.mT @ queries @ matrices.query
    energies, others = (moments.diagonal(dim1=-2, dim2=-1) for moments in (key_moments, query_moments))
    proportional = query_moments * (energies.sum(-1) / others.sum(-1))[:, None, None]
    assert torch.allclose(key_moments, proportional, rtol=0, atol=1e-9 * float(energies.max()))
    assert torch.allclose(energies, energies.mean(-1, keepdim=True).expand_as(energies), rtol=1e-9)
    assert torch.allclose(energies.sum(-1), keys.diagonal(dim1=-2, dim2=-1).sum(-1))  # keys keep their energy


def test_balance_is_the_fourth_root_of_energies_with_mean_one() -> None:
    still = Rotation(torch.zeros(0, dtype=torch.float64), 16)
    keys = torch.diag(torch.tensor([16.0, 1.0] * 8, dtype=torch.float64)).unsqueeze(0)
    queries = torch.eye(16, dtype=torch.float64).unsqueeze(0)
    balance = balance_of(keys, queries, still)
    assert torch.allclose(balance, torch.tensor([2**0.5, 0.5**0.5] * 8, dtype=torch.float64))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3", "phi"])
def test_balance_commutes_with_the_rotary_embedding(architecture: str) -> None:
    model = small_model(architecture)
    rotations = rotations_of(model)
    recipe = calibrated(architecture, RecipeName.BALANCED)
    assert recipe.balance is not None
    for layer, call in enumerate(seen_calls(model, random_texts().windows[0])):
        factors = torch.from_numpy(recipe.balance[layer])
        divided_first = rotations[layer].turn(call.key / factors, 300)
        assert torch.allclose(divided_first, rotations[layer].turn(call.key, 300) / factors, rtol=0, atol=1e-4)


def test_balance_does_not_depend_on_positions() -> None:
    moments = moments_of("llama")
    near, far = (
        solve_recipe(RecipeName.BALANCED, moments, rotations_of(small_model("llama")), count, Origin()).balance
        for count in (1, MAX_TOKENS)
    )
    assert near is not None and far is not None
    assert np.allclose(near, far, rtol=1e-5)


@pytest.mark.parametrize("name", [RecipeName.BALANCED, RecipeName.FULL])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3", "phi", "smollm3"])
def test_logits_stay_what_they_are(architecture: str, name: RecipeName) -> None:
    """Through the operations that workers use, in fp32."""
    model = small_model(architecture)
    layers = layer_recipes(
        calibrated(architecture, name), model.geometry.num_layers, torch.float32, model.module.device
    )
    for layer, call in zip(layers, seen_calls(model, random_texts().windows[0]), strict=True):
        expected = logits(call.query, call.key)
        assert layer.transform is not None
        found = logits(transform_queries(call.query, layer.transform), transform_keys(call.key, layer.transform))
        assert torch.allclose(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_a_head_dimension_that_is_no_power_of_two() -> None:
    recipe = calibrated("llama of head dimension 48", RecipeName.FULL)
    assert recipe.key_matrices is not None
    assert recipe.key_matrices.shape == (2, 2, 48, 48)


@pytest.mark.parametrize("name", [RecipeName.BALANCED, RecipeName.FULL])
@pytest.mark.parametrize("dead", ["one plane of keys", "one channel of queries", "all keys", "everything"])
def test_channels_without_energy_have_finite_factors(name: RecipeName, dead: str) -> None:
    keys, queries = (random_moments(HEAD_DIM, seed).unsqueeze(0) for seed in (1, 2))
    match dead:
        case "one plane of keys":
            for channel in (3, 3 + HEAD_DIM // 2):
                keys[..., channel, :] = keys[..., channel] = 0
        case "one channel of queries":
            queries[..., 5, :] = queries[..., 5] = 0
        case "all keys":
            keys.zero_()
        case _:
            keys.zero_()
            queries.zero_()
    rotation = Rotation(torch.logspace(0, -4, HEAD_DIM // 2, dtype=torch.float64), HEAD_DIM)
    recipe = solve_recipe(name, Moments(keys, queries), [rotation], 1000, Origin())
    assert all(np.abs(array).max() < 1e4 for array in recipe.arrays.values())


def test_moments_that_are_not_finite_are_refused() -> None:
    keys = torch.full((1, 1, 16, 16), torch.nan, dtype=torch.float64)
    still = Rotation(torch.zeros(0, dtype=torch.float64), 16)
    with pytest.raises(InvalidRequestError, match="not finite"):
        solve_recipe(RecipeName.FULL, Moments(keys, keys), [still], 1, Origin())


def test_fp32_inverts_the_matrices_of_the_most_unequal_channels() -> None:
    """Energies of 24 orders of magnitude, the largest keys where queries are smallest, in mixed directions and not."""
    energies = torch.logspace(-12, 12, HEAD_DIM, dtype=torch.float64)
    mixed = hadamard(HEAD_DIM) / HEAD_DIM**0.5
    still = Rotation(torch.zeros(0, dtype=torch.float64), HEAD_DIM)
    for axes in (torch.eye(HEAD_DIM, dtype=torch.float64), mixed):
        moments = Moments(*((axes * sizes @ axes.T)[None, None] for sizes in (energies, energies.flip(0))))
        recipe = solve_recipe(RecipeName.FULL, moments, [still], 1, Origin())
        assert recipe.key_matrices is not None and recipe.query_matrices is not None
        product = recipe.key_matrices @ np.swapaxes(recipe.query_matrices, -1, -2)
        assert np.abs(product - np.eye(HEAD_DIM)).max() < 1e-3
        assert np.linalg.cond(recipe.key_matrices.astype(np.float64)).max() < (1.1e6 * HEAD_DIM) ** 0.5


@pytest.mark.parametrize("order", [1, 2, 16, 48, 64, 80, 96, 128, 144, 160, 192, 256])
def test_hadamard_matrices(order: int) -> None:
    matrix = hadamard(order)
    assert (matrix.abs() == 1).all()
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order, dtype=torch.float64))


@pytest.mark.parametrize("order", [3, 112])
def test_no_hadamard_matrix(order: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"head dimension {order}"):
        hadamard(order)


def moments_of(architecture: str) -> Moments:
    moments = Moments.empty(small_model(architecture))
    for window in random_texts().windows:
        moments.add(small_model(architecture), window)
    return moments


def calibrated(architecture: str, name: RecipeName) -> Recipe:
    model = small_model(architecture)
    return solve_recipe(name, moments_of(architecture), rotations_of(model), MAX_TOKENS, Origin())


def logits(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """`(Hq, T, T)` of `query` `(T, Hq, D)` and `key` `(T, Hkv, D)`."""
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return torch.einsum("qhd,khd->hqk", query, keys)
