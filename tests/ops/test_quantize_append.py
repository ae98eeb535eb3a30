"""`quantize_append`: the right bytes at the right places, and no other byte touched."""

from __future__ import annotations

import pytest
import torch
from nvfp4_oracle import quantize_rows

from kvtier.errors import InvalidRequestError
from kvtier.ops import GlobalScales, quantize_append
from kvtier.pages.layout import PageFormat, PageLayout
from kvtier.pages.views import LayerView, layer_view

SCALES = GlobalScales(k=0.25, v=0.0123)
NUM_PAGES, LAYER = 5, 1


def _expected_rows(page_format: PageFormat, values: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of data and scales, `(N * H, bytes)` each."""
    rows = values.flatten(0, 1)
    match page_format:
        case PageFormat.NVFP4:
            data, scales = quantize_rows(rows.numpy(), scale)
            return torch.from_numpy(data.copy()), torch.from_numpy(scales)
        case PageFormat.FP8:
            data8 = (rows / torch.tensor(scale)).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            return data8, torch.empty(len(rows), 0, dtype=torch.uint8)
        case PageFormat.BF16:
            return rows.bfloat16().view(torch.uint8), torch.empty(len(rows), 0, dtype=torch.uint8)


@pytest.mark.parametrize("page_format", list(PageFormat))
@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 16), (32, 64), (64, 128), (128, 256)])
def test_pool_holds_the_expected_bytes_and_the_rest_is_untouched(
    page_format: PageFormat, page_size: int, head_dim: int
) -> None:
    heads = 3
    layout = PageLayout(page_format, 3, heads, head_dim, page_size)
    generator = torch.Generator().manual_seed(5)
    pool = torch.randint(0, 256, (NUM_PAGES, layout.page_bytes), dtype=torch.uint8, generator=generator)
    expected = pool.clone()
    slots = torch.randperm(NUM_PAGES * page_size, generator=generator)[:21]
    key, value = torch.randn(2, len(slots), heads, head_dim, generator=generator)
    values_and_regions = (
        (key, SCALES.k, layout.regions.k_data, layout.regions.k_scales),
        (value, SCALES.v, layout.regions.v_data, layout.regions.v_scales),
    )
    for values, scale, *regions in values_and_regions:
        for region, rows in zip(regions, _expected_rows(page_format, values, scale), strict=True):
            row_bytes = region.shape[2]
            for token, slot in enumerate(slots.tolist()):
                page, offset = divmod(slot, page_size)
                for head in range(heads):
                    first = LAYER * layout.layer_bytes + region.offset_bytes + (head * page_size + offset) * row_bytes
                    expected[page, first : first + row_bytes] = rows[token * heads + head]
    quantize_append(layer_view(pool, layout, LAYER), key, value, slots, SCALES)
    assert torch.equal(pool, expected)


def _small_view() -> tuple[torch.Tensor, LayerView]:
    layout = PageLayout(PageFormat.NVFP4, 1, 2, 16, 16)
    pool = torch.zeros(2, layout.page_bytes, dtype=torch.uint8)
    return pool, layer_view(pool, layout, 0)


def test_no_tokens_change_nothing() -> None:
    pool, view = _small_view()
    empty = torch.ones(0, 2, 16)
    quantize_append(view, empty, empty, torch.ones(0, dtype=torch.int64), GlobalScales())
    assert not pool.any()


def test_a_token_with_slot_minus_one_is_left_out() -> None:
    (pool, view), (expected, expected_view) = _small_view(), _small_view()
    tokens = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(0))
    quantize_append(view, tokens, tokens, torch.tensor([20, -1, 3]), GlobalScales())
    quantize_append(expected_view, tokens[::2], tokens[::2], torch.tensor([20, 3]), GlobalScales())
    assert expected.any() and torch.equal(pool, expected)


@pytest.mark.parametrize("slots", [[-2, 3], [3, 32]])
def test_slots_outside_the_pool_are_refused(slots: list[int]) -> None:
    pool, view = _small_view()
    tokens = torch.ones(2, 2, 16)
    with pytest.raises(InvalidRequestError, match=f"slots reach from {min(slots)} to {max(slots)} of 0 to 31"):
        quantize_append(view, tokens, tokens, torch.tensor(slots), GlobalScales())
    assert not pool.any()


@pytest.mark.parametrize(
    ("key_shape", "value_shape", "num_slots"),
    [
        ((2, 2, 16), (2, 2, 16), 3),
        ((2, 3, 16), (2, 3, 16), 2),
        ((2, 2, 16), (1, 2, 16), 2),
        ((2, 2, 32), (2, 2, 32), 2),
    ],
)
def test_shapes_that_disagree_are_refused(
    key_shape: tuple[int, ...], value_shape: tuple[int, ...], num_slots: int
) -> None:
    pool, view = _small_view()
    with pytest.raises(InvalidRequestError, match=r"must be \(tokens, 2, head_dim\)"):
        quantize_append(view, torch.ones(key_shape), torch.ones(value_shape), torch.arange(num_slots), GlobalScales())
    assert not pool.any()
