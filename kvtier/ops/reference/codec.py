"""Values to what the regions of a page hold and back, for every page format."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvtier.errors import InvalidRequestError
from kvtier.ops.reference import nvfp4
from kvtier.ops.reference.fp8 import to_e4m3
from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import BlockScales
from kvtier.pages.views import DATA_DTYPES, LayerView

_FORMATS = {dtype: page_format for page_format, dtype in DATA_DTYPES.items()}


@dataclass(frozen=True)
class GlobalScales:
    """The fp32 numbers that one layer's decoded K and V are multiplied by; pages of format bf16 do without.

    Raises `InvalidRequestError` when one is not positive and finite.
    """

    k: float = 1.0
    v: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.k < math.inf and 0 < self.v < math.inf):
            raise InvalidRequestError(f"global scales are {self.k} for K and {self.v} for V; use positive numbers")


class Encoded(NamedTuple):
    """Rows of a page: `data` and `scales` as in `LayerView`, in the values' shape up to the last dimension."""

    data: torch.Tensor
    scales: torch.Tensor


def page_format_of(view: LayerView) -> PageFormat:
    """The format of the pages behind `view`."""
    return _FORMATS[view.k_data.dtype]


def encode(
    values: torch.Tensor,
    page_format: PageFormat,
    global_scale: float,
    block_scales: BlockScales = BlockScales.LARGEST,
) -> Encoded:
    """What a page of `page_format` holds for `values`, floating point of shape `(..., D)`.

    nvfp4: see `nvfp4.quantize`; the other formats have no block scales. fp8: `values / global_scale` as saturating
    E4M3. bf16: the values rounded to bfloat16.
    """
    match page_format:
        case PageFormat.NVFP4:
            return Encoded(*nvfp4.quantize(values, global_scale, block_scales))
        case PageFormat.FP8:
            # NOTE: a tensor, not a Python number: on CUDA, torch divides by a number through its rounded reciprocal.
            multiplier = torch.full((), global_scale, dtype=torch.float32, device=values.device)
            data = to_e4m3(values.float() / multiplier)
        case PageFormat.BF16:
            data = values.to(torch.bfloat16)
    return Encoded(data, torch.empty((*values.shape[:-1], 0), dtype=torch.float8_e4m3fn, device=values.device))


def decode(encoded: Encoded, page_format: PageFormat, global_scale: float, dtype: torch.dtype) -> torch.Tensor:
    """The values `(..., D)` that `encoded` stands for, computed in fp32 and rounded to `dtype`.

    A float8_e4m3fn result saturates at 448.
    """
    match page_format:
        case PageFormat.NVFP4:
            return nvfp4.dequantize(encoded.data, encoded.scales, global_scale, dtype)
        case PageFormat.FP8:
            values = encoded.data.float().mul_(global_scale)
        case PageFormat.BF16:
            values = encoded.data
    return to_e4m3(values) if dtype is torch.float8_e4m3fn else values.to(dtype)


def round_trip(
    values: torch.Tensor,
    page_format: PageFormat,
    global_scale: float,
    block_scales: BlockScales = BlockScales.LARGEST,
) -> torch.Tensor:
    """What pages give back for `values`, in the dtype of `values`: the same bits as writing and gathering them."""
    encoded = encode(values, page_format, global_scale, block_scales)
    return decode(encoded, page_format, global_scale, values.dtype)
