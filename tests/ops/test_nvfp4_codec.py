"""The NVFP4 codec against a scalar oracle, byte for byte, and its bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nvfp4_oracle import E2M1, E4M3, dequantize_rows, quantize_rows

from kvtier.errors import InvalidRequestError
from kvtier.ops import nvfp4

GLOBAL_SCALES = [1.0, 0.25, 0.0123]
MIDPOINTS = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
NAN, INF = float("nan"), float("inf")


def _rows(kind: str) -> np.ndarray:
    """fp32 `(rows, 64)` of one kind of values."""
    random = np.random.default_rng(7)
    shape = (24, 64)
    match kind:
        case "normal":
            rows = random.normal(0, 2, shape)
        case "heavy tail":
            rows = random.standard_cauchy(shape)
        case "constant":
            rows = np.repeat(random.normal(0, 3, shape[0]), shape[1]).reshape(shape)
        case "zeros":
            rows = np.zeros(shape)
        case "negative zeros":
            rows = np.where(random.random(shape) < 0.5, -0.0, 0.0)
        case "some negative zeros":
            rows = np.where(random.random(shape) < 0.5, -0.0, random.normal(size=shape))
        case "infinities":
            rows = np.where(random.random(shape) < 0.05, random.choice([INF, -INF], shape), random.normal(size=shape))
        case "nan":
            rows = np.where(random.random(shape) < 0.1, random.choice([NAN, -NAN], shape), random.normal(size=shape))
        case "all nan":
            rows = np.full(shape, NAN)
        case "nan and infinities":
            rows = random.choice([NAN, -NAN, INF, -INF, 1.0, -0.0], shape)
        case "fp32 subnormals":
            rows = random.normal(0, 1e-40, shape)
        case "scales near their least":
            rows = random.normal(size=shape) * np.exp2(random.integers(-14, -3, (shape[0], 1)))
        case "scales near their greatest":
            rows = random.normal(size=shape) * np.exp2(random.integers(6, 13, (shape[0], 1)))
    with np.errstate(over="ignore"):
        return rows.astype(np.float32)


def _tie_rows(global_scale: float) -> np.ndarray:
    """For every E4M3 scale one block with all midpoints between codes, to be rounded at exactly that scale."""
    midpoints = np.array([6.0, *MIDPOINTS], dtype=np.float32)
    block = np.concatenate([midpoints, -midpoints])
    steps = np.array([float(scale) for scale in E4M3[1:]], dtype=np.float32) * np.float32(global_scale)
    return steps[:, None] * block


def _assert_equal_bytes(rows: np.ndarray, global_scale: float) -> None:
    data, scales = nvfp4.quantize(torch.from_numpy(rows), global_scale)
    expected_data, expected_scales = quantize_rows(rows, global_scale)
    np.testing.assert_array_equal(scales.view(torch.uint8).numpy(), expected_scales)
    np.testing.assert_array_equal(data.numpy(), expected_data)


@pytest.mark.parametrize("global_scale", GLOBAL_SCALES)
@pytest.mark.parametrize(
    "kind",
    [
        "normal",
        "heavy tail",
        "constant",
        "zeros",
        "negative zeros",
        "some negative zeros",
        "infinities",
        "nan",
        "all nan",
        "nan and infinities",
        "fp32 subnormals",
        "scales near their least",
        "scales near their greatest",
    ],
)
def test_bytes_equal_the_oracle(kind: str, global_scale: float) -> None:
    _assert_equal_bytes(_rows(kind), global_scale)


@pytest.mark.parametrize("global_scale", GLOBAL_SCALES)
def test_ties_at_every_scale_equal_the_oracle(global_scale: float) -> None:
    _assert_equal_bytes(_tie_rows(global_scale), global_scale)


@pytest.mark.parametrize("global_scale", GLOBAL_SCALES)
@pytest.mark.parametrize("ulps", range(-3, 4))
def test_blocks_between_two_scales_equal_the_oracle(global_scale: float, ulps: int) -> None:
    """The greatest magnitudes at which the scale is a tie between neighbours, and fp32 numbers next to them."""
    middles = np.array([float((low + high) / 2) for low, high in zip(E4M3, E4M3[1:], strict=False)], dtype=np.float32)
    amax = middles * (np.float32(6) * np.float32(global_scale))
    amax = (amax.view(np.int32) + ulps).view(np.float32)
    _assert_equal_bytes(np.linspace(-1, 1, 16, dtype=np.float32) * amax[:, None], global_scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_input_is_quantised_as_its_fp32_values(dtype: torch.dtype) -> None:
    values = torch.from_numpy(_rows("nan and infinities")).to(dtype)
    values[:, ::2] = torch.from_numpy(_rows("normal")).to(dtype)[:, ::2]
    data, scales = nvfp4.quantize(values, 0.25)
    expected_data, expected_scales = quantize_rows(values.float().numpy(), 0.25)
    np.testing.assert_array_equal(scales.view(torch.uint8).numpy(), expected_scales)
    np.testing.assert_array_equal(data.numpy(), expected_data)


def test_codes_come_from_the_reciprocal_and_not_from_division() -> None:
    """At scale 1.875 the fp32 reciprocal is above 1/1.875 and lifts the ties that would round down."""
    scale = np.float32(1.875)
    ties = np.array([1.25, 2.5, 5.0], dtype=np.float32) * scale
    assert (ties / scale).tolist() == [1.25, 2.5, 5.0]
    assert (ties * (np.float32(1) / scale) > [1.25, 2.5, 5.0]).all()
    row = torch.zeros(1, 16)
    row[0, :4] = torch.tensor([6 * 1.875, *ties.tolist()])
    data, scales = nvfp4.quantize(row, 1.0)
    assert scales.float().tolist() == [[1.875]]
    assert data[0].tolist() == [0x37, 0x75, 0, 0, 0, 0, 0, 0]  # division would give [0x27, 0x64, ...]


def test_one_block_by_hand() -> None:
    """amax 12 makes the scale 2; the low nibble is the even element; ties go to even codes; NaN and zero keep signs."""
    row = [12, -12, 0, -0.0, NAN, 0.5, 1.5, 2.5, 3.5, 5, 7, 10, -1, 2, -4, 8]
    data, scales = nvfp4.quantize(torch.tensor([row]), 1.0)
    assert scales.float().tolist() == [[2.0]]
    assert data[0].tolist() == [0xF7, 0x80, 0x00, 0x22, 0x44, 0x66, 0x29, 0x6C]


def test_scale_saturates_and_vanishes() -> None:
    row = torch.ones(3, 16)
    row[0] *= 1e6
    row[1] *= 6 * 2.0**-10
    row[2] *= 6 * 2.0**-10 * 1.001
    data, scales = nvfp4.quantize(row, 1.0)
    assert scales.float().flatten().tolist() == [448.0, 0.0, 2.0**-9]
    assert data[:, 0].tolist() == [0x77, 0x00, 0x55]


@pytest.mark.parametrize("global_scale", GLOBAL_SCALES)
def test_dequantize_equals_the_oracle_for_every_byte_and_scale(global_scale: float) -> None:
    data = torch.arange(256, dtype=torch.uint8).view(32, 8).repeat(127, 1)
    scales = torch.arange(127, dtype=torch.uint8).repeat_interleave(32).view(-1, 1)
    values = nvfp4.dequantize(data, scales.view(torch.float8_e4m3fn), global_scale)
    expected = dequantize_rows(data.numpy(), scales.numpy(), global_scale)
    assert values.dtype == torch.float32
    np.testing.assert_array_equal(values.numpy().view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dequantize_rounds_once_more_to_half_precision(dtype: torch.dtype) -> None:
    blocks = nvfp4.quantize(torch.from_numpy(_rows("normal")), 0.0123)
    assert torch.equal(nvfp4.dequantize(*blocks, 0.0123, dtype), nvfp4.dequantize(*blocks, 0.0123).to(dtype))


def test_dequantize_is_exact_in_bf16_at_global_scale_one() -> None:
    blocks = nvfp4.quantize(torch.from_numpy(_rows("heavy tail")), 1.0)
    assert torch.equal(nvfp4.dequantize(*blocks, 1.0, torch.bfloat16).float(), nvfp4.dequantize(*blocks, 1.0))


def test_dequantize_to_fp8_saturates() -> None:
    data, scales = nvfp4.quantize(torch.tensor([[2688.0, -2688.0, *[448.0] * 14]]), 1.0)
    values = nvfp4.dequantize(data, scales, 1.0, torch.float8_e4m3fn)
    assert values.float().tolist() == [[448.0, -448.0, *[448.0] * 14]]


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("global_scale", GLOBAL_SCALES)
def test_round_trip_error_is_within_half_a_step(head_dim: int, global_scale: float) -> None:
    """The widest gap between magnitudes is 2 (4 to 6), so no value moves by more than one scale of its block."""
    values = torch.randn(200, 2, head_dim, generator=torch.Generator().manual_seed(3))
    data, scales = nvfp4.quantize(values, global_scale)
    assert (data.shape, scales.shape) == ((200, 2, head_dim // 2), (200, 2, head_dim // 16))
    decoded = nvfp4.dequantize(data, scales, global_scale)
    error = (decoded - values).abs()
    bound = (scales.float() * global_scale).repeat_interleave(nvfp4.BLOCK_SIZE, dim=-1)
    assert bool((error <= bound * (1 + 1e-6)).all())
    relative = float(error.square().sum() / values.square().sum()) ** 0.5
    assert 0.06 < relative < 0.11


def test_quantising_decoded_values_again_changes_no_byte() -> None:
    values = torch.from_numpy(_rows("normal"))
    first = nvfp4.quantize(values, 0.25)
    second = nvfp4.quantize(nvfp4.dequantize(*first, 0.25), 0.25)
    assert torch.equal(first.data, second.data)
    assert torch.equal(first.scales.view(torch.uint8), second.scales.view(torch.uint8))


def test_magnitudes_are_those_of_e2m1() -> None:
    assert list(nvfp4.E2M1_MAGNITUDES) == [float(magnitude) for magnitude in E2M1]


def test_rows_that_are_not_whole_blocks_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="last dimension is 24"):
        nvfp4.quantize(torch.zeros(2, 24), 1.0)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_interleaving_is_the_formula_and_has_an_inverse(page_size: int, head_dim: int) -> None:
    blocks = head_dim // 16
    codes = torch.randint(0, 256, (2, 3, page_size, blocks), dtype=torch.uint8)
    expected = torch.empty_like(codes)
    for token in range(page_size):
        for block in range(blocks):
            to_token = (token // 4) * 4 + block // (blocks // 4)
            to_block = (block % (blocks // 4)) * 4 + token % 4
            expected[:, :, to_token, to_block] = codes[:, :, token, block]
    interleaved = nvfp4.interleave_v_scales(codes.view(torch.float8_e4m3fn))
    assert torch.equal(interleaved.view(torch.uint8), expected)
    assert torch.equal(nvfp4.deinterleave_v_scales(interleaved).view(torch.uint8), codes)


@pytest.mark.parametrize("shape", [(18, 4), (16, 1), (16, 6)])
def test_interleaving_refuses_what_sm100_cannot_read(shape: tuple[int, int]) -> None:
    scales = torch.zeros(shape).to(torch.float8_e4m3fn)
    for function in (nvfp4.interleave_v_scales, nvfp4.deinterleave_v_scales):
        with pytest.raises(InvalidRequestError, match=f"page_size {shape[0]} and head_dim {shape[1] * 16}"):
            function(scales)
