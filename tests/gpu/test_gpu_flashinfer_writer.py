"""FlashInfer's own NVFP4 writer and ours: the same bytes, so that pages can be handed over."""

from __future__ import annotations

import pytest
import torch
from random_values import KINDS, random_values

from kvtier import ops
from kvtier.ops import GlobalScales
from kvtier.pages.layout import PageFormat, PageLayout
from kvtier.pages.views import LayerView, layer_view

page = pytest.importorskip("flashinfer.page")

TOKENS, HEADS, HEAD_DIM, PAGE_SIZE = 8192, 8, 128, 64
_LAYOUT = PageLayout(PageFormat.NVFP4, 1, HEADS, HEAD_DIM, PAGE_SIZE)


def _differing(first: LayerView, second: LayerView) -> int:
    regions = zip(first, second, strict=True)
    return sum(int((one.view(torch.uint8) != other.view(torch.uint8)).sum()) for one, other in regions)


@pytest.mark.parametrize("global_scale", [1.0, 0.25, 0.0123])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_equal(device: torch.device, kind: str, global_scale: float) -> None:
    """Together: 12 kinds x 3 scales x 2 x 8,192 tokens x 1,024 = 6 * 10^8 values."""
    generator = torch.Generator(device).manual_seed(7)
    pools = torch.zeros(2, TOKENS // PAGE_SIZE, _LAYOUT.page_bytes, dtype=torch.uint8, device=device)
    ours, theirs = (layer_view(pool, _LAYOUT, 0) for pool in pools)
    key, value = (random_values(kind, (TOKENS, HEADS, HEAD_DIM), torch.bfloat16, generator) for _ in range(2))
    slots = torch.randperm(TOKENS, device=device, generator=generator)
    ops.quantize_append(ours, key, value, slots, GlobalScales(global_scale, global_scale))
    scale = torch.full((1,), global_scale, device=device)
    page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
        key,
        value,
        slots,
        (theirs.k_data, theirs.v_data),
        (theirs.k_scales, theirs.v_scales),
        scale,
        scale,
        kv_layout="HND",
    )
    assert _differing(ours, theirs) == 0
