"""Encoding for FP8 and BF16 pages, and what a round trip gives back."""

from __future__ import annotations

import pytest
import torch

from kvtier.errors import InvalidRequestError
from kvtier.ops import GlobalScales, round_trip
from kvtier.ops.reference.codec import decode, encode
from kvtier.pages.layout import PageFormat

NAN, INF = float("nan"), float("inf")


def test_fp8_is_a_saturating_cast_of_the_scaled_values() -> None:
    values = torch.tensor([[448.0, 464.0, 1e9, -INF, 1.0625, 1.1875, -0.0, 0.0009765625]])
    encoded = encode(2 * values, PageFormat.FP8, 2.0)
    assert encoded.data.float().tolist() == [[448.0, 448.0, 448.0, -448.0, 1.0, 1.25, -0.0, 0.0]]
    assert encoded.data.view(torch.uint8)[0, 6] == 0x80
    assert encoded.scales.shape == (1, 0)
    assert decode(encoded, PageFormat.FP8, 2.0, torch.float32).tolist() == [
        [896.0, 896.0, 896.0, -896.0, 2.0, 2.5, 0.0, 0.0]
    ]


def test_fp8_keeps_nan() -> None:
    assert bool(round_trip(torch.tensor([[NAN, -NAN]]), PageFormat.FP8, 1.0).isnan().all())


def test_bf16_stores_the_values_and_no_scale() -> None:
    """bfloat16 has 7 bits behind the point: ties go to even, and a large value stays finite."""
    values = torch.tensor([[1 + 2**-8, 2.0**127, -0.0, 1 + 3 * 2**-8]])
    encoded = encode(values, PageFormat.BF16, 0.0123)
    assert encoded.data.tolist() == [[1.0, 2.0**127, -0.0, 1 + 2**-6]]
    assert encoded.scales.shape == (1, 0)
    assert torch.equal(decode(encoded, PageFormat.BF16, 0.0123, torch.float32), encoded.data.float())


@pytest.mark.parametrize("page_format", list(PageFormat))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip_keeps_shape_and_dtype_and_is_idempotent(page_format: PageFormat, dtype: torch.dtype) -> None:
    values = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    once = round_trip(values, page_format, 0.25)
    assert (once.shape, once.dtype) == (values.shape, dtype)
    assert torch.equal(round_trip(once, page_format, 0.25), once)
    bound = {PageFormat.NVFP4: 0.11, PageFormat.FP8: 0.03, PageFormat.BF16: 0.003}[page_format]
    relative = (once.float() - values.float()).norm() / values.float().norm()
    assert float(relative) < bound


def test_bf16_values_survive_bf16_pages_unchanged() -> None:
    values = torch.randn(5, 2, 64).to(torch.bfloat16)
    assert torch.equal(round_trip(values, PageFormat.BF16, 1.0), values)


@pytest.mark.parametrize("scale", [0.0, -1.0, NAN, INF])
def test_global_scales_must_be_positive_and_finite(scale: float) -> None:
    with pytest.raises(InvalidRequestError, match="use positive numbers"):
        GlobalScales(k=scale)
    with pytest.raises(InvalidRequestError, match="use positive numbers"):
        GlobalScales(v=scale)
