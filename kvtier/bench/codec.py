"""`kvtier bench codec`: quantising new tokens into pages, transforming keys, and gathering cached tokens.

Times are those of one call among several in a CUDA graph, as in a model, where layer follows layer. Inputs take turns
over more than 1 GB, except for a few tokens: those of a decode step come from the cache in a model too. Bytes count
what must be read plus what must be written.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import NamedTuple

import torch

from kvtier import ops
from kvtier.bench.decode_cases import UNIT_SCALES, Geometry, random_basis
from kvtier.bench.gpu import OURS, ROTATED_BYTES, capture, copy_ceiling_gbps, measuring, median_replay_us, require_gpu
from kvtier.ops.reference import append as reference_append
from kvtier.ops.reference import gather as reference_gather
from kvtier.ops.reference import transform as reference_transform
from kvtier.ops.reference.transform import Balance, Matrices, Transform
from kvtier.pages.layout import PageFormat, PageLayout
from kvtier.pages.recipe import BlockScales
from kvtier.pages.views import LayerView, layer_view

_MAX_LAYERS = 64


class Row(NamedTuple):
    """One result. `differing_bytes` counts against the torch reference.

    Products with matrices may differ where an exact one lies halfway between two numbers: sums have another order.
    """

    impl: str
    operation: str
    input: str
    output: str
    num_kv_heads: int
    head_dim: int
    tokens: int
    page_size: int
    median_us: float
    gbps: float
    share_of_copy_ceiling: float
    differing_bytes: int


class _Layers(NamedTuple):
    """Pages of several layers with new tokens for each; every token has its place in a page."""

    layout: PageLayout
    views: list[LayerView]
    keys: torch.Tensor  # (layers, tokens, Hkv, D) bfloat16
    values: torch.Tensor
    slots: torch.Tensor
    page_table: torch.Tensor  # one sequence of all tokens
    lengths: torch.Tensor


def run(geometries: Sequence[Geometry], token_counts: Sequence[int], page_size: int, replays: int) -> list[Row]:
    """Measures all combinations. Raises `KernelError` without a GPU."""
    device = require_gpu()
    ceiling = copy_ceiling_gbps(device)
    print(f"copy ceiling {ceiling:.0f} GB/s read and written", file=sys.stderr)
    rows: list[Row] = []
    for geometry in geometries:
        for num_tokens in token_counts:
            layers = _make_layers(geometry, num_tokens, page_size, device)
            rows += _append_rows(layers, ceiling, replays)
            rows += _transform_rows(layers, ceiling, replays)
            rows += _gather_rows(layers, ceiling, replays)
            del layers
            gc.collect()
            torch.cuda.empty_cache()
    return rows


def _make_layers(geometry: Geometry, num_tokens: int, page_size: int, device: torch.device) -> _Layers:
    _, num_heads, head_dim = geometry
    input_bytes = num_tokens * num_heads * head_dim * 4
    num_layers = min(max(2, -(-ROTATED_BYTES // input_bytes)), _MAX_LAYERS)
    layout = PageLayout(PageFormat.NVFP4, num_layers, num_heads, head_dim, page_size)
    num_pages = -(-num_tokens // page_size)
    generator = torch.Generator(device).manual_seed(0)
    order = torch.randperm(num_pages, device=device, generator=generator)
    pool = torch.zeros(num_pages, layout.page_bytes, dtype=torch.uint8, device=device)
    shape = (num_layers, num_tokens, num_heads, head_dim)
    keys, values = (torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator) for _ in range(2))
    return _Layers(
        layout,
        [layer_view(pool, layout, layer) for layer in range(num_layers)],
        keys,
        values,
        (order.unsqueeze(1) * page_size + torch.arange(page_size, device=device)).flatten()[:num_tokens],
        order.int().unsqueeze(0),
        torch.tensor([num_tokens], dtype=torch.int32, device=device),
    )


class _Measured(NamedTuple):
    impl: str
    median_us: float
    differing_bytes: int


def _row(
    operation: str, types: tuple[str, str], layers: _Layers, total_bytes: int, ceiling: float, of: _Measured
) -> Row:
    num_tokens, layout = len(layers.slots), layers.layout
    gbps = total_bytes / of.median_us / 1e3
    return Row(
        impl=of.impl,
        operation=operation,
        input=types[0],
        output=types[1],
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        tokens=num_tokens,
        page_size=layout.page_size,
        median_us=round(of.median_us, 2),
        gbps=round(gbps, 1),
        share_of_copy_ceiling=round(gbps / ceiling, 4),
        differing_bytes=of.differing_bytes,
    )


def _codec_bytes(layers: _Layers, value_bytes: int) -> int:
    """Bytes of K and V of all tokens, packed and, at `value_bytes` a value, unpacked."""
    layout = layers.layout
    values_a_token = 2 * layout.num_kv_heads * layout.head_dim
    return len(layers.slots) * (layout.token_bytes // layout.num_layers + values_a_token * value_bytes)


def _append_rows(layers: _Layers, ceiling: float, replays: int) -> Iterator[Row]:
    for block_scales in BlockScales:
        contenders: dict[str, Callable[[int], None]] = {OURS: _kvtier_append(layers, block_scales)}
        if find_spec("flashinfer") is not None and block_scales is BlockScales.LARGEST:
            contenders["flashinfer"] = _flashinfer_append(layers)
        expected = _zeros_like(layers.views[0])
        tokens = layers.keys[0], layers.values[0], layers.slots
        reference_append.quantize_append(expected, *tokens, UNIT_SCALES, block_scales)
        for impl, append in contenders.items():
            for region in layers.views[0]:
                region.view(torch.uint8).zero_()
            operation = f"quantize_append, scales by {block_scales}"
            with measuring(impl, operation):
                median_us = _median_call_us(append, layers.layout.num_layers, replays)
                measured = _Measured(impl, median_us, _differing_bytes(layers.views[0], expected))
                yield _row(operation, ("bf16", "nvfp4"), layers, _codec_bytes(layers, 2), ceiling, measured)


def _kvtier_append(layers: _Layers, block_scales: BlockScales) -> Callable[[int], None]:
    def append(layer: int) -> None:
        tokens = layers.keys[layer], layers.values[layer], layers.slots
        ops.quantize_append(layers.views[layer], *tokens, UNIT_SCALES, block_scales)

    return append


def _transform_rows(layers: _Layers, ceiling: float, replays: int) -> Iterator[Row]:
    """The transform of K in the recipes `balanced` and `full`."""
    num_heads, head_dim = layers.keys.shape[-2:]
    device, dtype, first_keys = layers.keys.device, layers.keys.dtype, layers.keys[0]
    balance = Balance.of(torch.rand(num_heads, head_dim, device=device) + 0.5)
    basis = random_basis(num_heads, head_dim, torch.Generator(device).manual_seed(0))
    transforms: dict[str, tuple[Transform, torch.Tensor]] = {
        "balanced": (balance, reference_transform.balanced(first_keys, balance.key)),
        "full": (Matrices(basis, basis), reference_transform.multiplied(first_keys, basis)),
    }
    for name, (transform, expected) in transforms.items():

        def kvtier(layer: int, transform: Transform = transform) -> None:
            ops.transform_keys(layers.keys[layer], transform)

        median_us = _median_call_us(kvtier, layers.layout.num_layers, replays)
        measured = _Measured(OURS, median_us, _differing_bytes([ops.transform_keys(first_keys, transform)], [expected]))
        total_bytes = 2 * first_keys.numel() * dtype.itemsize
        yield _row(f"transform_keys, {name}", ("bf16", "bf16"), layers, total_bytes, ceiling, measured)


def _differing_bytes(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> int:
    return sum(
        int((one.view(torch.uint8) != other.view(torch.uint8)).sum())
        for one, other in zip(found, expected, strict=True)
    )


def _zeros_like(view: LayerView) -> LayerView:
    return LayerView(*(torch.zeros_like(region, memory_format=torch.contiguous_format) for region in view))


def _flashinfer_append(layers: _Layers) -> Callable[[int], None]:
    from flashinfer.page import nvfp4_quantize_append_paged_kv_cache_with_slot_mapping as append_to_slots

    unit = torch.ones(1, device=layers.slots.device)

    def append(layer: int) -> None:
        view = layers.views[layer]
        data, scales = (view.k_data, view.v_data), (view.k_scales, view.v_scales)
        append_to_slots(
            layers.keys[layer], layers.values[layer], layers.slots, data, scales, unit, unit, kv_layout="HND"
        )

    return append


def _gather_rows(layers: _Layers, ceiling: float, replays: int) -> Iterator[Row]:
    starts = torch.zeros_like(layers.lengths)
    pages = (layers.page_table, layers.lengths, starts, UNIT_SCALES)
    for dtype, name in ((torch.float8_e4m3fn, "fp8"), (torch.bfloat16, "bf16")):
        spaces = [ops.Workspace(*(torch.empty_like(key, dtype=dtype) for _ in range(2))) for key in layers.keys]
        expected = ops.Workspace(*(torch.empty_like(space) for space in spaces[0]))
        reference_gather.gather_dequantize(layers.views[0], *pages, expected)

        def kvtier(layer: int, spaces: list[ops.Workspace] = spaces) -> None:
            ops.gather_dequantize(layers.views[layer], *pages, spaces[layer])

        contenders: dict[str, Callable[[int], None]] = {OURS: kvtier}
        if find_spec("flashinfer") is not None and dtype is torch.bfloat16:
            contenders["flashinfer"] = _flashinfer_gather(layers, spaces)
        for impl, gather in contenders.items():
            for space in spaces[0]:
                space.view(torch.uint8).fill_(0x7F)
            with measuring(impl, "gather_dequantize"):
                median_us = _median_call_us(gather, layers.layout.num_layers, replays)
                measured = _Measured(impl, median_us, _differing_bytes(spaces[0], expected))
                yield _row(
                    "gather_dequantize",
                    ("nvfp4", name),
                    layers,
                    _codec_bytes(layers, dtype.itemsize),
                    ceiling,
                    measured,
                )


def _flashinfer_gather(layers: _Layers, spaces: list[ops.Workspace]) -> Callable[[int], None]:
    from flashinfer import nvfp4_kv_dequantize_paged

    unit = torch.ones(1, device=layers.lengths.device)

    def gather(layer: int) -> None:
        view, (key, value) = layers.views[layer], spaces[layer]
        data, scales = (view.k_data, view.v_data), (view.k_scales, view.v_scales)
        out = (key.unsqueeze(0), value.unsqueeze(0))
        nvfp4_kv_dequantize_paged(data, scales, layers.page_table, layers.lengths, unit, unit, *out, kv_layout="HND")

    return gather


def _median_call_us(call: Callable[[int], None], num_layers: int, replays: int) -> float:
    graph = capture([lambda layer=layer: call(layer) for layer in range(num_layers)])  # type: ignore[misc]
    return median_replay_us([graph], replays) / num_layers
