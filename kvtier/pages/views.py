"""Torch views of pages in a pool, as attention kernels take them. No byte is copied."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvtier.pages.layout import PageFormat, PageLayout, Region

DATA_DTYPES = {
    PageFormat.NVFP4: torch.uint8,
    PageFormat.FP8: torch.float8_e4m3fn,
    PageFormat.BF16: torch.bfloat16,
}


class LayerView(NamedTuple):
    """One layer of every page of a pool; writing to a view writes the pool.

    Shapes, with pages P, KV heads H, tokens T, head dimension D:
        k_data, v_data: `(P, H, T, D/2)` uint8 (nvfp4, even element in the low nibble), `(P, H, T, D)` float8_e4m3fn
            (fp8) or bfloat16 (bf16).
        k_scales, v_scales: `(P, H, T, D/16)` float8_e4m3fn, linear; the last dimension is 0 for fp8 and bf16.
    """

    k_data: torch.Tensor
    k_scales: torch.Tensor
    v_data: torch.Tensor
    v_scales: torch.Tensor


def layer_view(pool: torch.Tensor, layout: PageLayout, layer: int) -> LayerView:
    """Layer `layer` of a pool given as `(pages, page_bytes)` uint8."""
    start = layer * layout.layer_bytes
    data_dtype = DATA_DTYPES[layout.page_format]

    def view(region: Region, dtype: torch.dtype) -> torch.Tensor:
        heads, tokens, row_bytes = region.shape
        first = start + region.offset_bytes
        rows = pool[:, first : first + region.num_bytes].view(dtype)
        return rows.view(pool.shape[0], heads, tokens, row_bytes // dtype.itemsize)

    regions = layout.regions
    return LayerView(
        view(regions.k_data, data_dtype),
        view(regions.k_scales, torch.float8_e4m3fn),
        view(regions.v_data, data_dtype),
        view(regions.v_scales, torch.float8_e4m3fn),
    )
