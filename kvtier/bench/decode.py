"""`kvtier bench decode`: attention of one layer and one step over paged caches, ours and every peer's, in one run.

Every case is timed as replays of CUDA graphs that hold one call each and take turns over more than 1 GB of pages. The
error is against fp64 attention to the values that the pages stand for, over the first and the last sequence.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from kvtier import ops
from kvtier.bench.decode_cases import (
    UNIT_SCALES,
    Case,
    Contender,
    Decoder,
    Geometry,
    Inputs,
    Load,
    checked_sequences,
    exact_output,
    make_inputs,
)
from kvtier.bench.decode_peers import installed_peers
from kvtier.bench.gpu import OURS, capture, measuring, median_replay_us, read_ceiling_gbps, require_gpu
from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import RecipeName
from kvtier.pages.views import LayerView


class Row(NamedTuple):
    """One result. `rel_l2` is the relative L2 error; shares are fractions."""

    impl: str
    format: str
    geometry: str
    batch: int
    context: int
    page_size: int
    median_us: float
    gbps: float
    share_of_read_ceiling: float
    rel_l2: float


def run(geometries: Sequence[Geometry], loads: Sequence[Load], page_sizes: Sequence[int], replays: int) -> list[Row]:
    """Measures all combinations. What a contender cannot do is named on stderr and has no row.

    Raises `KernelError` without a GPU.
    """
    device = require_gpu()
    ceiling = read_ceiling_gbps(device)
    ours = Contender(OURS, PageFormat.NVFP4, _prepare_kvtier)
    with_recipes = [_contender_with(recipe) for recipe in (RecipeName.FULL, RecipeName.BALANCED)]
    contenders = [ours, *with_recipes, *installed_peers(device)]
    print(f"read ceiling {ceiling:.0f} GB/s", file=sys.stderr)
    cases = [Case(geometry, load, size) for geometry in geometries for load in loads for size in page_sizes]
    return [row for case in cases for row in _rows(case, contenders, ceiling, replays, device)]


def _prepare_kvtier(inputs: Inputs) -> Decoder:
    workspace = ops.DecodeWorkspace(inputs.query.device, inputs.case.load.batch, inputs.case.geometry.num_kv_heads)

    def decode(view: LayerView) -> torch.Tensor:
        pages = (view, inputs.page_table, inputs.lengths, UNIT_SCALES)
        return ops.decode_attention(inputs.query, *pages, inputs.softmax_scale, workspace=workspace).out

    return decode


def _contender_with(recipe: RecipeName) -> Contender:
    prepare = functools.partial(_prepare_with_recipe, recipe)
    return Contender(f"{OURS}, recipe {recipe}", PageFormat.NVFP4, prepare, recipe=recipe)


def _prepare_with_recipe(recipe: RecipeName, inputs: Inputs) -> Decoder:
    """The queries of a decode with a calibrated recipe are transformed in every layer, and half a page is open."""
    workspace = ops.DecodeWorkspace(inputs.query.device, inputs.case.load.batch, inputs.case.geometry.num_kv_heads)
    lengths, transform = inputs.lengths_before_tail, inputs.transforms[recipe]

    def decode(view: LayerView) -> torch.Tensor:
        query = ops.transform_queries(inputs.query, transform)
        pages = (view, inputs.page_table, lengths, UNIT_SCALES)
        return ops.decode_attention(query, *pages, inputs.softmax_scale, tail=inputs.tail, workspace=workspace).out

    return decode


def _rows(
    case: Case, contenders: Sequence[Contender], ceiling: float, replays: int, device: torch.device
) -> Iterator[Row]:
    for page_format in PageFormat:
        of_format = [contender for contender in contenders if contender.page_format is page_format]
        if not of_format:
            continue
        inputs = make_inputs(case, page_format, device)
        for contender in of_format:
            expected = exact_output(inputs, contender.recipe)
            with measuring(contender.impl, f"{page_format} pages, {case}"):
                yield _measure(contender, inputs, expected, ceiling, replays)
        del inputs
        gc.collect()
        torch.cuda.empty_cache()


def _measure(contender: Contender, inputs: Inputs, expected: torch.Tensor, ceiling: float, replays: int) -> Row:
    case = inputs.case
    views = [_dense(view) for view in inputs.views] if contender.dense else inputs.views
    decode = contender.prepare(inputs)
    found = decode(views[0])[checked_sequences(case)].double()
    graphs = [capture([lambda view=view: decode(view)]) for view in views]  # type: ignore[misc]
    median_us = median_replay_us(graphs, replays)
    gbps = case.cache_bytes(contender.page_format) / median_us / 1e3
    return Row(
        contender.impl,
        contender.page_format,
        str(case.geometry),
        case.load.batch,
        case.load.context,
        case.page_size,
        round(median_us, 1),
        round(gbps, 1),
        round(gbps / ceiling, 4),
        float((found - expected).norm() / expected.norm()),
    )


def _dense(view: LayerView) -> LayerView:
    return LayerView(*(region.contiguous() for region in view))
