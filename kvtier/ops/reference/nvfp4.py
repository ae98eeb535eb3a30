"""The NVFP4 codec: values to E2M1 codes with one E4M3 scale for 16 of them, and back.

A value is `e2m1 * e4m3_block_scale * fp32_global_scale`. Bit for bit what FlashInfer's append kernel writes, so that
pages are interchangeable with engines that use it. E2M1 has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6; bit 3 of a
code is the sign, and the low nibble of a byte is the even element.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from kvtier.errors import InvalidRequestError
from kvtier.ops.reference.fp8 import to_e4m3
from kvtier.ops.reference.scale_search import choose_scales
from kvtier.pages.layout import BLOCK_SIZE
from kvtier.pages.recipe import BlockScales

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
INTERLEAVED_TOKENS = 4  # tokens whose V scales SM100 kernels read together


class Nvfp4Blocks(NamedTuple):
    """Quantised values of shape `(..., D)`: `data` uint8 `(..., D/2)`, `scales` float8_e4m3fn `(..., D/16)`."""

    data: torch.Tensor
    scales: torch.Tensor


def quantize(values: torch.Tensor, global_scale: float, block_scales: BlockScales = BlockScales.LARGEST) -> Nvfp4Blocks:
    """Codes and linear scales of `values`, floating point of shape `(..., D)` with D a multiple of 16.

    For each block of 16, in fp32: `scale = e4m3(amax / (6 * global_scale))`, saturating at 448, where `amax` passes
    over NaN; `code = e2m1(value * (1 / (scale * global_scale)))`, rounded to nearest with ties to even and saturating
    at 6. All codes of a block whose scale rounds to 0 are 0. NaN becomes code 0, and every code keeps its value's sign.
    `BlockScales.SEARCH` takes a better scale near that one, see `scale_search`.
    """
    if values.shape[-1] % BLOCK_SIZE:
        raise InvalidRequestError(f"the last dimension is {values.shape[-1]}; NVFP4 needs a multiple of {BLOCK_SIZE}")
    # NOTE: a tensor, not a Python number: on CUDA, torch divides by a number through its rounded reciprocal.
    multiplier = torch.full((), global_scale, dtype=torch.float32, device=values.device)
    blocks = torch.unflatten(values.float(), -1, (-1, BLOCK_SIZE))
    amax = blocks.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1)
    scales = to_e4m3(amax / (E2M1_MAGNITUDES[-1] * multiplier))
    if block_scales is BlockScales.SEARCH:
        scales = choose_scales(blocks, scales, multiplier)
    step = scales.float() * multiplier
    # NOTE: multiply by the reciprocal. True division gives other codes at ties when the scale's mantissa is 1.875.
    reciprocal = torch.where(step == 0, 0, 1 / step)
    codes = _round_to_e2m1((blocks * reciprocal.unsqueeze(-1)).abs())
    codes = (codes | torch.signbit(blocks).to(torch.uint8) << 3).flatten(-2)
    return Nvfp4Blocks(codes[..., 0::2] | codes[..., 1::2] << 4, scales)


def dequantize(
    data: torch.Tensor, scales: torch.Tensor, global_scale: float, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Values `(..., D)` of `dtype` from `data` uint8 `(..., D/2)` and linear `scales` float8_e4m3fn `(..., D/16)`.

    `e2m1 * scale` is exact in fp32; the product with the global scale is rounded to fp32, then to `dtype`
    (saturating for float8_e4m3fn).
    """
    pairs = _pair_table(data.device).index_select(0, data.flatten().int())
    values = pairs.view(torch.float32).view(*scales.shape, BLOCK_SIZE)
    values.mul_(scales.float().unsqueeze(-1)).mul_(global_scale)
    values = values.flatten(-2)
    return to_e4m3(values) if dtype is torch.float8_e4m3fn else values.to(dtype)


def interleave_v_scales(scales: torch.Tensor) -> torch.Tensor:
    """V scales `(..., page_size, S)` in the order that SM100 kernels read, from the linear order of a page.

    With S = D/16, the scale of token t and block s moves to token `(t // 4) * 4 + s // (S / 4)` and block
    `(s % (S / 4)) * 4 + t % 4`. Raises `InvalidRequestError` unless page_size is a multiple of 4 and D of 64.
    """
    groups, quarter = _interleaving(scales)
    grid = scales.reshape(*scales.shape[:-2], groups, INTERLEAVED_TOKENS, 4, quarter)
    return grid.movedim(-3, -1).reshape(scales.shape)


def deinterleave_v_scales(scales: torch.Tensor) -> torch.Tensor:
    """The inverse of `interleave_v_scales`; shapes and errors are the same."""
    groups, quarter = _interleaving(scales)
    grid = scales.reshape(*scales.shape[:-2], groups, 4, quarter, INTERLEAVED_TOKENS)
    return grid.movedim(-1, -3).reshape(scales.shape)


def _round_to_e2m1(magnitudes: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 7, uint8: how many of the midpoints between neighbours lie below (ties go to the even code).

    NaN compares false with every midpoint and so becomes 0.
    """
    codes = (magnitudes > 0.25).to(torch.uint8)
    codes += magnitudes >= 0.75
    codes += magnitudes > 1.25
    codes += magnitudes >= 1.75
    codes += magnitudes > 2.5
    codes += magnitudes >= 3.5
    codes += magnitudes > 5.0
    return codes


@functools.cache
def _pair_table(device: torch.device) -> torch.Tensor:
    """The two fp32 values of every byte, as one int64 element: gathering 8 bytes at once is four times faster."""
    codes = torch.tensor(E2M1_MAGNITUDES + tuple(-magnitude for magnitude in E2M1_MAGNITUDES), device=device)
    byte = torch.arange(256, device=device)
    return torch.stack((codes[byte & 0xF], codes[byte >> 4]), dim=-1).view(torch.int64).flatten()


def _interleaving(scales: torch.Tensor) -> tuple[int, int]:
    """Groups of 4 tokens in a page, and a quarter of the blocks in a row."""
    page_size, blocks = scales.shape[-2:]
    if page_size % INTERLEAVED_TOKENS or blocks % 4:
        raise InvalidRequestError(
            f"V scales of page_size {page_size} and head_dim {blocks * BLOCK_SIZE} cannot be interleaved; "
            "SM100 kernels need a page_size that is a multiple of 4 and a head_dim that is a multiple of 64"
        )
    return page_size // INTERLEAVED_TOKENS, blocks // 4
