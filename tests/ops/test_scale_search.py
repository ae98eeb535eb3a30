"""The search for block scales, against exact errors of all candidates in fp64, from the definition of the format."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nvfp4_oracle import E2M1, E4M3

from kvtier.ops import nvfp4
from kvtier.pages.recipe import BlockScales

_GRID = np.array([float(magnitude) for magnitude in E2M1])
_SCALES = np.array([float(scale) for scale in E4M3])
OFFSETS = (0, -1, 1, 4, 5)


def _exact_error(block: np.ndarray, step: float) -> float:
    """Least squared error of a block with this step."""
    distances = np.abs(np.abs(block)[:, None] - _GRID * step)
    return float((distances.min(1) ** 2).sum())


def _codes(values: torch.Tensor, global_scale: float, rule: BlockScales) -> np.ndarray:
    return nvfp4.quantize(values, global_scale, rule).scales.view(torch.uint8).numpy()[..., 0].astype(int)


@pytest.mark.parametrize("global_scale", [1.0, 0.0123])
@pytest.mark.parametrize("spread", ["normal", "heavy tails", "least scales"])
def test_the_chosen_scale_has_the_least_error(spread: str, global_scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(400, 16, generator=generator)
    if spread == "heavy tails":
        values = torch.tan(values.clamp(-1.5, 1.5))
    magnitude = -6 if spread == "least scales" else 0
    values *= torch.exp2(torch.randn(400, 1, generator=generator) * 2 + magnitude) * global_scale
    plain, chosen = (_codes(values, global_scale, rule) for rule in (BlockScales.LARGEST, BlockScales.SEARCH))
    searched = 0
    for block, plain_code, chosen_code in zip(values.double().numpy(), plain, chosen, strict=True):
        if not 4 <= plain_code <= 121:
            assert chosen_code == plain_code
            continue
        searched += 1
        errors = {offset: _exact_error(block, _SCALES[plain_code + offset] * global_scale) for offset in OFFSETS}
        assert errors[chosen_code - plain_code] <= min(errors.values()) * 1.01
    assert 100 < searched <= 400
    assert (searched == 400) == (spread != "least scales")
    assert len(set(chosen - plain)) == len(OFFSETS)


def test_it_gains_a_quarter_on_normal_values() -> None:
    values = torch.randn(2000, 128, generator=torch.Generator().manual_seed(1))
    errors = {}
    for rule in BlockScales:
        blocks = nvfp4.quantize(values, 1.0, rule)
        errors[rule] = float((nvfp4.dequantize(*blocks, 1.0) - values).square().sum())
    assert errors[BlockScales.SEARCH] / errors[BlockScales.LARGEST] == pytest.approx(0.74, abs=0.01)


def test_values_of_the_grid_are_kept_exactly() -> None:
    steps = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -6.0, 3.0, 1.0, -1.5, 2.0, 0.0, 4.0])
    values = steps * torch.tensor([[0.25], [1.875], [40.0]])
    blocks = nvfp4.quantize(values, 1.0, BlockScales.SEARCH)
    assert torch.equal(nvfp4.dequantize(*blocks, 1.0), values)


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_a_block_with_a_value_that_is_not_finite_keeps_its_plain_scale(special: float) -> None:
    values = torch.randn(50, 16, generator=torch.Generator().manual_seed(2))
    values[:, 3] = special
    plain, searched = (nvfp4.quantize(values, 1.0, rule) for rule in (BlockScales.LARGEST, BlockScales.SEARCH))
    assert torch.equal(plain.scales.view(torch.uint8), searched.scales.view(torch.uint8))
    assert torch.equal(plain.data, searched.data)


def test_zeros_stay_zeros() -> None:
    blocks = nvfp4.quantize(torch.zeros(3, 16), 1.0, BlockScales.SEARCH)
    assert not blocks.data.any()
    assert not blocks.scales.view(torch.uint8).any()
