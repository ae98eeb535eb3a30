"""What a decode step takes while another process moves pages between the same GPU and host memory, both ways."""

from __future__ import annotations

import asyncio
import multiprocessing
from multiprocessing.synchronize import Event

import numpy as np
import torch

from kvtier import ops
from kvtier.bench.decode_cases import UNIT_SCALES, Case, Geometry, Load, make_inputs
from kvtier.bench.gpu import capture, require_gpu
from kvtier.bench.transfer import PREFIX_PAGE_BYTES, find_gpu, open_pools
from kvtier.errors import GpuError
from kvtier.pages.layout import PageFormat

_CASE = Case(Geometry(32, 8, 128), Load(32, 8192), 64)
_LAYERS = 32
_STEPS = 1000
_WARM_UP_STEPS = 100
_MOVED_PAGES = 256
_START_S = 120.0


def _move_until(stop: Event, moves: Event) -> None:
    """A process that spills and promotes without a pause."""

    async def move() -> None:
        with open_pools(find_gpu(), 2 * _MOVED_PAGES, PREFIX_PAGE_BYTES) as pools:
            down, up = slice(None, _MOVED_PAGES), slice(_MOVED_PAGES, None)
            while not stop.is_set():
                await asyncio.gather(
                    pools.mover.spill(pools.device_slots[down], pools.host_slots[down]),
                    pools.mover.promote(pools.host_slots[up], pools.device_slots[up]),
                )
                moves.set()

    asyncio.run(move())


def measure_decode() -> dict[str, float]:
    """Median and p99 of a step of 32 layers alone and beside moves, in microseconds, and their ratios.

    Raises `KernelError` without a GPU.
    """
    device = require_gpu()
    inputs = make_inputs(_CASE, PageFormat.NVFP4, device)
    workspace = ops.DecodeWorkspace(device, _CASE.load.batch, _CASE.geometry.num_kv_heads)

    def step() -> None:
        for layer in range(_LAYERS):
            view = inputs.views[layer % len(inputs.views)]
            pages = (view, inputs.page_table, inputs.lengths, UNIT_SCALES)
            ops.decode_attention(inputs.query, *pages, inputs.softmax_scale, workspace=workspace)

    graph = capture([step])
    alone = _step_times_us(graph)
    context = multiprocessing.get_context("spawn")
    stop, moves = context.Event(), context.Event()
    mover = context.Process(target=_move_until, args=(stop, moves))
    mover.start()
    try:
        if not moves.wait(_START_S):
            raise GpuError("the process that moves pages beside the decode did not start; its error is above")
        beside = _step_times_us(graph)
    finally:
        stop.set()
        mover.join()
    alone += _step_times_us(graph)  # before and after, so that neither has the warmer machine
    figures: dict[str, float] = {}
    for name, percent in (("p50", 50), ("p99", 99)):
        before, now = float(np.percentile(alone, percent)), float(np.percentile(beside, percent))
        figures |= {f"decode_alone_{name}_us": before, f"decode_beside_moves_{name}_us": now}
        figures[f"decode_{name}_over_alone"] = now / before
    return figures


def _step_times_us(graph: torch.cuda.CUDAGraph) -> list[float]:
    """Microseconds of many replays in a row."""
    for _ in range(_WARM_UP_STEPS):
        graph.replay()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_STEPS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return [1e3 * float(first.elapsed_time(second)) for first, second in zip(marks, marks[1:], strict=False)]
