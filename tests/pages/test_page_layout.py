"""Sizes and places of the regions of a page, and the torch views of them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from kvtier.errors import InvalidRequestError
from kvtier.pages.layout import PAGE_SIZES, PageFormat, PageLayout
from kvtier.pages.views import DATA_DTYPES, layer_view

GEOMETRIES = list(product(PageFormat, PAGE_SIZES, [16, 48, 64, 128, 256], [1, 3]))
REGION_NAMES = ("k_data", "k_scales", "v_data", "v_scales")


def test_nvfp4_bytes_per_token_and_head() -> None:
    nvfp4, fp8, bf16 = (PageLayout(page_format, 1, 1, 128) for page_format in PageFormat)
    assert nvfp4.data_row_bytes + nvfp4.scale_row_bytes == 72
    assert (nvfp4.token_bytes, fp8.token_bytes, bf16.token_bytes) == (144, 256, 512)
    assert nvfp4.page_bytes / fp8.page_bytes == 0.5625
    assert nvfp4.page_bytes / bf16.page_bytes == 0.28125
    assert PageLayout(PageFormat.NVFP4, 1, 1, 256).data_row_bytes == 128


def test_page_bytes_of_a_known_model() -> None:
    """80 layers, 8 KV heads of dimension 128, 64 tokens: 80 * 8 * 64 * 2 * 72."""
    layout = PageLayout(PageFormat.NVFP4, 80, 8, 128)
    assert (layout.page_size, layout.layer_bytes, layout.page_bytes) == (64, 73728, 5898240)
    assert layout.token_bytes * 64 == layout.page_bytes


@pytest.mark.parametrize(("page_format", "page_size", "head_dim", "heads"), GEOMETRIES)
def test_regions_follow_each_other_on_multiples_of_16(
    page_format: PageFormat, page_size: int, head_dim: int, heads: int
) -> None:
    layout = PageLayout(page_format, 3, heads, head_dim, page_size)
    row_bytes = {
        PageFormat.NVFP4: (head_dim // 2, head_dim // 16),
        PageFormat.FP8: (head_dim, 0),
        PageFormat.BF16: (2 * head_dim, 0),
    }[page_format]
    end = 0
    for region, num_bytes in zip(layout.regions, row_bytes * 2, strict=True):
        assert region.offset_bytes == end
        assert region.shape == (heads, page_size, num_bytes)
        assert region.offset_bytes % 16 == 0
        end += heads * page_size * num_bytes
    assert layout.layer_bytes == end
    assert layout.layer_bytes % 16 == 0
    assert layout.page_bytes == 3 * end


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"page_size": 48}, "page_size is 48; use one of 16, 32, 64, 128"),
        ({"page_size": 0}, "page_size is 0"),
        ({"page_size": 256}, "page_size is 256"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"head_dim": 72}, "head_dim is 72; it must be a positive multiple of 16"),
        ({"head_dim": -16}, "head_dim is -16"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_kv_heads": -1}, "num_kv_heads -1"),
    ],
)
def test_impossible_pages_are_refused(changed: dict[str, int], message: str) -> None:
    numbers: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "page_size": 64, **changed}
    with pytest.raises(InvalidRequestError, match=message):
        PageLayout(PageFormat.NVFP4, **numbers)


@pytest.mark.parametrize("page_format", list(PageFormat))
@pytest.mark.parametrize("name", REGION_NAMES)
def test_a_view_writes_exactly_the_bytes_of_its_region(page_format: PageFormat, name: str) -> None:
    layout = PageLayout(page_format, num_layers=3, num_kv_heads=2, head_dim=32, page_size=16)
    pool = torch.zeros(4, layout.page_bytes, dtype=torch.uint8)
    view = getattr(layer_view(pool, layout, 1), name)
    region = getattr(layout.regions, name)
    view[2].view(torch.uint8).fill_(0xAB)
    expected = torch.zeros_like(pool)
    first = layout.layer_bytes + region.offset_bytes
    expected[2, first : first + region.num_bytes] = 0xAB
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("page_format", list(PageFormat))
def test_views_address_page_head_token_and_element(page_format: PageFormat) -> None:
    layout = PageLayout(page_format, num_layers=2, num_kv_heads=3, head_dim=32, page_size=16)
    pool = torch.randint(0, 256, (3, layout.page_bytes), dtype=torch.uint8)
    data_dtype = DATA_DTYPES[page_format]
    for layer, page, head, token in product(range(2), range(3), range(3), (0, 7, 15)):
        view = layer_view(pool, layout, layer)
        assert view.k_data.dtype == view.v_data.dtype == data_dtype
        assert view.k_scales.dtype == view.v_scales.dtype == torch.float8_e4m3fn
        for name in REGION_NAMES:
            region = getattr(layout.regions, name)
            _, _, row_bytes = region.shape
            row = getattr(view, name)[page, head, token]
            first = layer * layout.layer_bytes + region.offset_bytes + (head * 16 + token) * row_bytes
            assert row.view(torch.uint8).tolist() == pool[page, first : first + row_bytes].tolist()


@pytest.mark.parametrize("page_format", list(PageFormat))
def test_views_of_all_layers_cover_the_pool_once(page_format: PageFormat) -> None:
    layout = PageLayout(page_format, num_layers=3, num_kv_heads=2, head_dim=48, page_size=32)
    pool = torch.zeros(2, layout.page_bytes, dtype=torch.uint8)
    for layer in range(3):
        for region in layer_view(pool, layout, layer):
            region.view(torch.uint8).add_(1)
    assert pool.unique().tolist() == [1]
    assert layer_view(pool, layout, 2).k_data.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()
