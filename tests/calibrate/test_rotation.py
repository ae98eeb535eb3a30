"""The rotary embeddings that are read from models are what those models do, at any position."""

from __future__ import annotations

import pytest
import torch
from calibration_models import HEAD_DIM, MAX_TOKENS, random_texts, seen_calls, small_model

from kvtier.calibrate import Rotation, rotations_of
from kvtier.errors import InvalidRequestError

TURNED = ["llama", "yarn", "qwen2", "gemma3", "phi", "smollm3"]


@pytest.mark.parametrize("architecture", TURNED)
@pytest.mark.parametrize("distance", [1, 63, 448])
def test_turned_keys_and_queries_are_those_at_other_positions(architecture: str, distance: int) -> None:
    model = small_model(architecture)
    (tokens,) = random_texts(num_windows=1).windows
    near, far = seen_calls(model, tokens), seen_calls(model, tokens, distance)
    for rotation, here, there in zip(rotations_of(model), near, far, strict=True):
        assert torch.allclose(rotation.turn(here.key, distance), there.key, rtol=0, atol=1e-3 * here.key.abs().max())
        assert torch.allclose(
            rotation.turn(here.query, distance), there.query, rtol=0, atol=1e-3 * here.query.abs().max()
        )


@pytest.mark.parametrize(
    ("architecture", "num_frequencies"),
    [("llama", [16, 16]), ("gemma3", [16, 16]), ("phi", [8, 8]), ("smollm3", [16, 0])],
)
def test_as_many_planes_as_the_model_turns(architecture: str, num_frequencies: list[int]) -> None:
    assert [len(rotation.frequencies) for rotation in rotations_of(small_model(architecture))] == num_frequencies


def test_layers_of_gemma3_have_their_own_frequencies() -> None:
    local, everywhere = (rotation.frequencies for rotation in rotations_of(small_model("gemma3")))
    exponents = torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM
    assert torch.allclose(local, 1e4**-exponents, rtol=1e-5)
    assert torch.allclose(everywhere, 1e6**-exponents, rtol=1e-5)


def test_a_model_that_turns_neighbours_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="layer 0 of cohere does not turn channel c with channel c"):
        rotations_of(small_model("cohere"))


def test_hooks_are_removed() -> None:
    model = small_model("llama")
    rotations_of(model)
    assert not any(module._forward_pre_hooks for module in model.module.modules())


@pytest.mark.parametrize("architecture", ["llama", "phi", "smollm3"])
def test_spread_moments_are_the_mean_over_all_positions(architecture: str) -> None:
    """Against turning the vectors to every position, one by one."""
    model = small_model(architecture)
    rotations = rotations_of(model)
    for rotation, call in zip(rotations, seen_calls(model, random_texts(1, 8).windows[0]), strict=True):
        keys = call.key.transpose(0, 1).double()
        turned = [rotation.turn(keys, position) for position in range(MAX_TOKENS)]
        expected = torch.stack([keys.mT @ keys for keys in turned]).mean(0)
        spread = rotation.spread(keys.mT @ keys, MAX_TOKENS)
        assert torch.allclose(spread, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))


def test_one_position_changes_nothing() -> None:
    rotation = Rotation(torch.tensor([1.0, 0.1], dtype=torch.float64), 5)
    moments = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(rotation.spread(moments + moments.T, 1), moments + moments.T, atol=1e-12)


def test_turning_keeps_what_planes_share() -> None:
    rotation = Rotation(torch.tensor([1.0, 0.1], dtype=torch.float64), 5)
    values = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    shared = rotation.share_in_planes(values.square())
    assert torch.allclose(rotation.share_in_planes(rotation.turn(values, 11).square()), shared)
    assert torch.equal(shared[:, :2], shared[:, 2:4])
    assert torch.equal(shared[:, 4], values[:, 4].square())
