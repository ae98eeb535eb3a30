"""`kvtier bench serving`: tokens a second that a worker decodes, by page format, at equal concurrency and memory.

A step is all that a worker does for the next token of every sequence: inputs to the GPU, the forward pass as a CUDA
graph, greedy sampling, tokens back to the host. The model has random weights, and the pool is filled with random pages
at once: no prompt is prefilled, and no daemon takes part. Neither changes what a step reads and computes.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from kvtier.bench.gpu import capture, measuring, require_gpu
from kvtier.bench.serving_cases import PAGE_SIZE, Contender, ModelShape, contenders, fill, make_model, recipe_of
from kvtier.ops import DecodeTables, OpenPages
from kvtier.pages.layout import PageFormat, PageLayout
from kvtier.worker import PrefillAttends, WorkerModel
from kvtier.worker.batch import PagedKv
from kvtier.worker.chunk import Chunk
from kvtier.worker.open_pages import OpenPageStore
from kvtier.worker.sampling import Sampler, Sampling, choose_tokens
from kvtier.worker.step import StepRunner

_WARM_UP_STEPS = 3
_ATTENTION_REPLAYS = 8


class Row(NamedTuple):
    """One result; `step_ms` is a median.

    `load`: "one sequence", "equal concurrency" (as many as fit in BF16) or "equal memory" (as many as fit).
    `share_of_attention`: of the attention to pages in the time of a step.
    """

    impl: str
    format: str
    load: str
    context: int
    batch: int
    tokens_per_s: float
    step_ms: float
    attention_ms: float
    share_of_attention: float


class Load(NamedTuple):
    """How many sequences decode at a time, and why so many."""

    name: str
    batch: int


def run(shape: ModelShape, contexts: Sequence[int], pool_bytes: int, steps: int) -> list[Row]:
    """Measures every contender at every context; what a peer cannot do is named on stderr and has no row.

    Raises `KernelError` without a GPU.
    """
    device = require_gpu()
    model = make_model(shape, device)
    memory = torch.empty(pool_bytes, dtype=torch.uint8, device=device)
    rows: list[Row] = []
    filled: PageFormat | None = None
    for contender in contenders():
        layout = model.identity(contender.page_format, PAGE_SIZE).layout
        num_pages = pool_bytes // layout.page_bytes
        pool = memory[: num_pages * layout.page_bytes].view(num_pages, layout.page_bytes)
        pages = PagedKv.of(pool, layout, recipe_of(contender, shape), model.dtype)
        if filled is not contender.page_format:
            generator = torch.Generator(device).manual_seed(0)
            for view in pages.views:
                fill(view, contender.page_format, generator)
            filled = contender.page_format
        for context in contexts:
            for load in _loads(layout, pool_bytes, context, steps):
                with measuring(contender.impl, f"{contender.page_format} pages, {load.batch} x {context}"):
                    rows.append(_measure(contender, model, pages, context, load, steps))
                    print(*rows[-1], file=sys.stderr)
                gc.collect()
                torch.cuda.empty_cache()
    return rows


def _pages_a_sequence(context: int, steps: int) -> int:
    return -(-(context + _WARM_UP_STEPS + steps) // PAGE_SIZE)


def _loads(layout: PageLayout, pool_bytes: int, context: int, steps: int) -> Iterator[Load]:
    num_fitting, num_fitting_bf16 = (
        pool_bytes // of_format.page_bytes // _pages_a_sequence(context, steps)
        for of_format in (layout, dataclasses.replace(layout, page_format=PageFormat.BF16))
    )
    if num_fitting_bf16 > 1:
        yield Load("one sequence", 1)
    if num_fitting_bf16:
        yield Load("equal concurrency", num_fitting_bf16)
    if num_fitting:
        yield Load("equal memory", num_fitting)


def _measure(contender: Contender, model: WorkerModel, pages: PagedKv, context: int, load: Load, steps: int) -> Row:
    step_ms = _step_ms(contender, model, pages, context, load.batch, steps)
    attention_ms = _attention_ms(contender, model, pages, context, load.batch)
    return Row(
        contender.impl,
        contender.page_format,
        load.name,
        context,
        load.batch,
        round(load.batch / step_ms * 1e3, 1),
        round(step_ms, 3),
        round(attention_ms, 3),
        round(attention_ms / step_ms, 4),
    )


def _page_table(pages: PagedKv, batch: int, pages_a_sequence: int) -> torch.Tensor:
    """Pages of the pool in random order `(batch, pages)` int32, on the host."""
    order = torch.randperm(pages.num_pages, generator=torch.Generator().manual_seed(0))
    return order[: batch * pages_a_sequence].view(batch, -1).int()


def _step_ms(contender: Contender, model: WorkerModel, pages: PagedKv, context: int, batch: int, steps: int) -> float:
    open_pages = OpenPageStore(pages.layout, contender.open_page, batch, pages.device)
    runner = StepRunner(model, pages, open_pages, PrefillAttends.FRESH, make_decode=contender.make_decode)
    samplers = [Sampler(Sampling())] * batch
    page_lists = _page_table(pages, batch, _pages_a_sequence(context, steps)).tolist()
    # Sequences stand at different places of their pages, so that in every step some page becomes full.
    positions = [context - index * 7 % PAGE_SIZE - 1 for index in range(batch)]
    tokens = [index % model.vocab_size for index in range(batch)]
    times_ms: list[float] = []
    for _ in range(_WARM_UP_STEPS + steps):
        started_s = time.perf_counter()
        chunks = [
            Chunk([token], position, own, slot)
            for slot, (token, position, own) in enumerate(zip(tokens, positions, page_lists, strict=True))
        ]
        tokens = choose_tokens(*runner.run(chunks), samplers)
        positions = [position + 1 for position in positions]
        times_ms.append((time.perf_counter() - started_s) * 1e3)
    return statistics.median(times_ms[_WARM_UP_STEPS:])


def _attention_ms(contender: Contender, model: WorkerModel, pages: PagedKv, context: int, batch: int) -> float:
    """Milliseconds of the attention of all layers alone."""
    layout, device = pages.layout, pages.device
    table = _page_table(pages, batch, -(-context // PAGE_SIZE))
    paged = context - PAGE_SIZE // 2 if contender.has_recipe else context
    lengths = torch.full((batch,), paged // PAGE_SIZE * PAGE_SIZE, dtype=torch.int32)
    decode = contender.make_decode(DecodeTables(table.to(device), lengths.to(device), table.numpy(), lengths.numpy()))
    num_query_heads = model.module.config.num_attention_heads
    query = torch.randn(batch, num_query_heads, layout.head_dim, dtype=model.dtype, device=device)
    tail = None
    if contender.has_recipe:
        shape = (batch, PAGE_SIZE, layout.num_kv_heads, layout.head_dim)
        key, value = torch.randn(2, *shape, dtype=torch.bfloat16, device=device)
        tail = OpenPages(key, value, torch.full((batch,), PAGE_SIZE // 2, dtype=torch.int32, device=device))

    def attend() -> None:
        for view, recipe in zip(pages.views, pages.recipes, strict=True):
            decode.attend(query, view, recipe.scales, layout.head_dim**-0.5, tail=tail)

    graph = capture([attend])
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    for _ in range(_ATTENTION_REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / _ATTENTION_REPLAYS
