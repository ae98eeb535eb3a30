"""Pages of a test's own, without a daemon, and the comparison of replies that rests on them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tiny_models import PAGE_SIZE, plain_logits

from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import PLAIN, Recipe
from kvtier.worker.batch import PackedBatch, PagedKv
from kvtier.worker.chunk import Chunk
from kvtier.worker.model import WorkerModel
from kvtier.worker.open_pages import OpenPageStore
from kvtier.worker.options import OpenPage, PrefillAttends

NUM_SLOTS = 8
UNTOUCHED = 0xAA
BF16_BOUND = 0.05
"""Greedy tokens over bf16 pages are those of plain attention, unless its top two logits lie closer than this.

K and V lose 16 of their 24 significant bits; the top two logits of the tiny models lie 0.3 apart in the median.
"""
ARITHMETIC_BOUND = 0.02
"""Two ways to compute the same from the same pages agree, unless the top two logits lie closer than this.

fp32 sums in another order differ in their last bits, and now and then a value is then rounded to the neighbouring code.
What a wrong recipe or open page would do is twenty times more.
"""


class ScratchPool:
    """Pages filled with `UNTOUCHED`, open pages, and forward passes over them."""

    def __init__(
        self,
        model: WorkerModel,
        page_format: PageFormat,
        attends: PrefillAttends,
        open_page: OpenPage = OpenPage.BF16,
        recipe: Recipe = PLAIN,
    ) -> None:
        self.model, self.page_format, self.attends, self.open_page = model, page_format, attends, open_page
        layout = model.identity(page_format, PAGE_SIZE).layout
        self.memory = np.full((64, layout.page_bytes), UNTOUCHED, dtype=np.uint8)
        self.pages = PagedKv.of(self.memory, layout, recipe, model.dtype)
        self.open_pages = OpenPageStore(layout, open_page, NUM_SLOTS)

    def batch(self, *chunks: Chunk) -> PackedBatch:
        """Chunks of sequences with open pages in slots below `NUM_SLOTS`."""
        return PackedBatch(chunks, self.pages, self.open_pages, self.attends)

    def logits(self, *chunks: Chunk) -> torch.Tensor:
        """Logits behind the last token of every chunk."""
        return self.model.forward(self.batch(*chunks))

    def touched_pages(self) -> list[int]:
        """Pages of which any byte was written."""
        return [page for page, image in enumerate(self.memory) if (image != UNTOUCHED).any()]


def pages_for(num_tokens: int, first_page: int = 0) -> list[int]:
    """Page numbers for a sequence, in an order that is not that of the pool."""
    return [first_page + index for index in reversed(range(-(-num_tokens // PAGE_SIZE)))]


def prefill(tokens: Sequence[int], pages: Sequence[int], open_slot: int = 0) -> Chunk:
    """A first prefill."""
    return Chunk(tokens, 0, pages, open_slot)


def assert_greedy(model: WorkerModel, prompt: Sequence[int], reply: Sequence[int], bound: float) -> None:
    """Every token of `reply` is what plain transformers choose there, or at most `bound` below its logit.

    Where all top logits lie further apart, this is equality with a reply that transformers generate themselves.
    """
    logits = plain_logits(model, [*prompt, *reply[:-1]])[len(prompt) - 1 :]
    below_top = logits.max(dim=-1).values - logits[range(len(reply)), list(reply)]
    assert below_top.max() <= bound, f"a token lies {below_top.max():.4f} below the top"
    top = logits.topk(2).values
    assert (top[:, 0] - top[:, 1]).median() > 2 * bound, "the logits lie too close together to tell"


def assert_same_reply(
    model: WorkerModel,
    page_format: PageFormat,
    prompt: Sequence[int],
    first: Sequence[int],
    second: Sequence[int],
    open_page: OpenPage = OpenPage.BF16,
    recipe: Recipe = PLAIN,
) -> None:
    """Two replies over pages of one format are the same, up to where two logits lie closer than `ARITHMETIC_BOUND`."""
    assert len(first) == len(second)
    differing = [index for index, (one, other) in enumerate(zip(first, second, strict=True)) if one != other]
    if differing:
        tokens = [*prompt, *first[: differing[0]]]
        pool = ScratchPool(model, page_format, PrefillAttends.QUANTIZED, open_page, recipe)
        logits = pool.logits(prefill(tokens, pages_for(len(tokens))))[0]
        apart = abs(float(logits[first[differing[0]]] - logits[second[differing[0]]]))
        assert apart <= ARITHMETIC_BOUND, f"token {differing[0]} differs, {apart:.4f} apart: {first} and {second}"
