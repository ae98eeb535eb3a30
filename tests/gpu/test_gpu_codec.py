"""quantize_append and gather_dequantize on the GPU against the references, byte for byte."""

from __future__ import annotations

import itertools

import pytest
import torch
from random_values import KINDS, random_values

from kvtier import ops
from kvtier.errors import InvalidRequestError
from kvtier.ops import GlobalScales, Workspace
from kvtier.ops.cuda.variants import GatherVariant
from kvtier.ops.reference import append as reference_append
from kvtier.ops.reference import gather as reference_gather
from kvtier.pages.layout import PageFormat, PageLayout
from kvtier.pages.recipe import BlockScales
from kvtier.pages.views import layer_view

DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
LAYER = 1
PAIRS = list(zip(KINDS, KINDS[1:] + KINDS[:1], strict=True))  # of K and V


def _without_nan_signs(codes: torch.Tensor) -> torch.Tensor:
    """The sign of a NaN in E4M3 is not specified."""
    return torch.where(codes == 0xFF, 0x7F, codes)


def _random_pool(layout: PageLayout, num_pages: int, generator: torch.Generator) -> torch.Tensor:
    shape = (num_pages, layout.page_bytes)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=generator.device, generator=generator)


def _assert_append_is_exact(
    layout: PageLayout,
    num_tokens: int,
    kinds: tuple[str, str],
    dtype: torch.dtype,
    scales: GlobalScales,
    generator: torch.Generator,
    block_scales: BlockScales = BlockScales.LARGEST,
) -> None:
    """Writes tokens to scattered slots of a pool full of garbage; strides are those of head-major and fused K and V."""
    num_pages = -(-num_tokens // layout.page_size) + 2
    pool = _random_pool(layout, num_pages, generator)
    expected = pool.clone()
    num_slots = num_pages * layout.page_size
    slots = torch.randperm(num_slots, device=generator.device, generator=generator)[:num_tokens]
    shape = (num_tokens, layout.num_kv_heads, layout.head_dim)
    key, value = (random_values(kind, shape, dtype, generator) for kind in kinds)
    key = key.transpose(0, 1).contiguous().transpose(0, 1)
    value = torch.cat((value, value), 1)[:, layout.num_kv_heads :]
    ops.quantize_append(layer_view(pool, layout, LAYER), key, value, slots, scales, block_scales)
    reference_append.quantize_append(layer_view(expected, layout, LAYER), key, value, slots, scales, block_scales)
    if layout.page_format is PageFormat.FP8:
        pool, expected = _without_nan_signs(pool), _without_nan_signs(expected)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("global_scale", [1.0, 0.25, 0.0123])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(8, 128), (4, 256)])
def test_append_of_10_to_the_8_values(
    device: torch.device, global_scale: float, num_kv_heads: int, head_dim: int
) -> None:
    """Together: 12 pairs of kinds x 2 x 8,192 tokens x 1,024 x 6 cases."""
    generator = torch.Generator(device).manual_seed(1)
    layout = PageLayout(PageFormat.NVFP4, 2, num_kv_heads, head_dim, 64)
    scales = GlobalScales(global_scale, global_scale)
    for kinds in PAIRS:
        _assert_append_is_exact(layout, 8192, kinds, torch.bfloat16, scales, generator)


@pytest.mark.parametrize("global_scale", [1.0, 0.0123])
@pytest.mark.parametrize("dtype", DTYPES)
def test_append_with_searched_block_scales(device: torch.device, dtype: torch.dtype, global_scale: float) -> None:
    """Together: 12 pairs of kinds x 2 x 2,048 tokens x 1,024 x 6 cases."""
    generator = torch.Generator(device).manual_seed(4)
    layout = PageLayout(PageFormat.NVFP4, 2, 8, 128, 64)
    for kinds in PAIRS:
        scales = GlobalScales(global_scale, 1.0)
        _assert_append_is_exact(layout, 2048, kinds, dtype, scales, generator, BlockScales.SEARCH)


@pytest.mark.parametrize("page_format", list(PageFormat))
@pytest.mark.parametrize("dtype", DTYPES)
def test_append_of_every_format_and_geometry(device: torch.device, page_format: PageFormat, dtype: torch.dtype) -> None:
    generator = torch.Generator(device).manual_seed(2)
    geometries = ((16, 16), (16, 64), (32, 80), (64, 128), (128, 256))
    for (page_size, head_dim), kinds in zip(geometries, itertools.cycle(PAIRS[::3]), strict=False):
        layout = PageLayout(page_format, 3, 3, head_dim, page_size)
        _assert_append_is_exact(layout, 333, kinds, dtype, GlobalScales(0.25, 0.0123), generator)


def test_append_skips_slots_outside_the_pool(device: torch.device) -> None:
    layout = PageLayout(PageFormat.NVFP4, 2, 2, 64, 16)
    pool = torch.zeros(2, layout.page_bytes, dtype=torch.uint8, device=device)
    key = torch.ones(4, 2, 64, dtype=torch.bfloat16, device=device)
    slots = torch.tensor([-1, 5, 32, 1 << 40], device=device)
    view = layer_view(pool, layout, LAYER)
    ops.quantize_append(view, key, key, slots, GlobalScales())
    written = view.k_scales.view(torch.uint8).any(-1).any(1)
    assert written.nonzero().tolist() == [[0, 5]]


def test_append_refuses_scales_that_it_cannot_round(device: torch.device) -> None:
    layout = PageLayout(PageFormat.NVFP4, 1, 1, 64, 16)
    pool = torch.zeros(1, layout.page_bytes, dtype=torch.uint8, device=device)
    key = torch.ones(1, 1, 64, dtype=torch.bfloat16, device=device)
    with pytest.raises(InvalidRequestError, match="kernels take 2\\^-80 to 2\\^80"):
        ops.quantize_append(
            layer_view(pool, layout, 0), key, key, torch.zeros(1, dtype=torch.long, device=device), GlobalScales(1e-30)
        )


GATHER_SCALES = pytest.mark.parametrize(
    "scales", [GlobalScales(), GlobalScales(300.0, 1e-6)], ids=["unit scales", "scaled"]
)
GATHER_GEOMETRIES = pytest.mark.parametrize(
    ("page_size", "num_heads", "head_dim"), [(16, 3, 16), (16, 8, 128), (32, 2, 80), (128, 4, 256)]
)


@pytest.mark.parametrize("page_format", list(PageFormat))
@pytest.mark.parametrize("dtype", DTYPES)
@GATHER_SCALES
@GATHER_GEOMETRIES
def test_gather(
    device: torch.device,
    page_format: PageFormat,
    dtype: torch.dtype,
    scales: GlobalScales,
    page_size: int,
    num_heads: int,
    head_dim: int,
) -> None:
    layout = PageLayout(page_format, 2, num_heads, head_dim, page_size)
    _assert_gather_is_exact(device, layout, dtype, scales)


@GATHER_SCALES
@GATHER_GEOMETRIES
def test_gather_with_large_thread_blocks(
    device: torch.device,
    scales: GlobalScales,
    page_size: int,
    num_heads: int,
    head_dim: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GatherVariant, "for_launch", lambda variant, *_: variant._replace(values=64))
    layout = PageLayout(PageFormat.NVFP4, 2, num_heads, head_dim, page_size)
    _assert_gather_is_exact(device, layout, torch.float8_e4m3fn, scales)


def _assert_gather_is_exact(device: torch.device, layout: PageLayout, dtype: torch.dtype, scales: GlobalScales) -> None:
    """Ragged sequences from a pool of garbage; entries of the page table past a length name no page."""
    generator = torch.Generator(device).manual_seed(3)
    page_size = layout.page_size
    lengths = [5 * page_size + 3, 0, page_size, 1, 9 * page_size - 1]
    starts = torch.tensor([7, 3, 990 + 15 * page_size, 6, 20 + 6 * page_size], dtype=torch.int32, device=device)
    pool = _random_pool(layout, 30, generator)
    view = layer_view(pool, layout, LAYER)
    for block_scales in (view.k_scales, view.v_scales):
        block_scales.view(torch.uint8).bitwise_and_(0x7F).clamp_(
            max=0x7E
        )  # finite block scales, as a writer makes them
    before = pool.clone()
    table = torch.randint(-5, (1 << 31) - 1, (5, 9), dtype=torch.int32, device=device, generator=generator)
    order = torch.randperm(30, device=device, generator=generator).int()
    for row, length in zip(table, lengths, strict=True):
        num_pages = -(-length // page_size)
        row[:num_pages], order = order[:num_pages], order[num_pages:]
    shape = (2, 1000 + 16 * page_size, layout.num_kv_heads, layout.head_dim)
    found = torch.full(shape, 7.0, device=device).to(dtype)
    expected = found.clone()
    arguments = (
        view,
        table,
        torch.tensor(lengths, dtype=torch.int32, device=device),
        starts,
        scales,
    )
    ops.gather_dequantize(*arguments, Workspace(*found))
    reference_gather.gather_dequantize(*arguments, Workspace(*expected))
    assert torch.equal(found.float().isnan(), expected.float().isnan())
    bits = torch.uint8 if dtype.itemsize == 1 else torch.int16
    finite = ~found.float().isnan()
    assert torch.equal(found.view(bits)[finite], expected.view(bits)[finite])
    assert torch.equal(pool, before)
