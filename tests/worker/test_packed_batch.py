"""Forward passes over pages, without a daemon: what a batch computes, and what it writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scratch_pool import ScratchPool, pages_for, prefill
from tiny_models import ARCHITECTURES, PAGE_SIZE, plain_logits, random_tokens, tiny_model

from kvtier.pages.layout import PageFormat
from kvtier.worker.chunk import Chunk
from kvtier.worker.options import OpenPage, PrefillAttends

EXACT = {"rtol": 1e-4, "atol": 1e-4}
"""Nothing but the order of fp32 sums differs; logits of these models reach from -10 to 10."""
ROUNDED = {"rtol": 0.0, "atol": 0.02}
"""As above, and now and then a value is therefore rounded to the neighbouring code. Quantisation does 0.5."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_first_prefill_computes_what_plain_attention_computes(architecture: str) -> None:
    model, tokens = tiny_model(architecture), random_tokens(90)
    for page_format in PageFormat:  # the first prefill attends to fresh values: the format does not matter
        logits = ScratchPool(model, page_format, PrefillAttends.FRESH).logits(prefill(tokens, pages_for(90)))
        torch.testing.assert_close(logits[0], plain_logits(model, tokens)[-1], **EXACT)


@pytest.mark.parametrize("attends", PrefillAttends)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_sequences_do_not_see_each_other(architecture: str, attends: PrefillAttends) -> None:
    """Three decodes, an extend and two first prefills in one row, against each of them alone."""
    model = tiny_model(architecture)
    lengths = (40, 17, 32, 50, 33, 1)
    starts = (39, 16, 31, 20, 0, 0)
    chunks, before = [], []
    for index, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        tokens, pages = random_tokens(length, seed=index), pages_for(length, 8 * index)
        before.append(prefill(tokens[:start], pages, index))
        chunks.append(Chunk(tokens[start:], start, pages, index))

    def computed_in(pool: ScratchPool, *indices: int) -> torch.Tensor:
        for index in indices:
            if starts[index]:
                pool.logits(before[index])
        return pool.logits(*(chunks[index] for index in indices))

    packed = computed_in(ScratchPool(model, PageFormat.NVFP4, attends), *range(len(chunks)))
    for index, row in enumerate(packed):
        alone = computed_in(ScratchPool(model, PageFormat.NVFP4, attends), index)
        torch.testing.assert_close(row, alone[0], **ROUNDED)


@pytest.mark.parametrize("open_page", OpenPage)
@pytest.mark.parametrize("page_format", PageFormat)
def test_last_token_of_a_matched_prompt_is_read_and_not_written(page_format: PageFormat, open_page: OpenPage) -> None:
    """It attends to pages alone, and its logits are those of the prompt when it was computed."""
    model, tokens, pages = tiny_model("qwen3"), random_tokens(2 * PAGE_SIZE), pages_for(2 * PAGE_SIZE)
    pool = ScratchPool(model, page_format, PrefillAttends.QUANTIZED, open_page)
    whole = pool.logits(prefill(tokens, pages))
    pool.logits(prefill(random_tokens(PAGE_SIZE - 1, seed=1), [9]))  # the slot held another open page meanwhile
    before = pool.memory.copy()
    again = pool.logits(Chunk(tokens[-1:], len(tokens) - 1, pages, 0, is_shared=True))
    assert np.array_equal(pool.memory, before)
    torch.testing.assert_close(again, whole, **ROUNDED)


def test_writes_its_own_slots_and_nothing_else() -> None:
    model = tiny_model("llama")
    pool = ScratchPool(model, PageFormat.BF16, PrefillAttends.FRESH, OpenPage.OFF)
    pool.logits(Chunk(random_tokens(PAGE_SIZE), 0, [3], 0), Chunk(random_tokens(PAGE_SIZE), 0, [5], 1))
    assert pool.touched_pages() == [3, 5]
    first_bytes = pool.memory.copy()
    pool.logits(Chunk(random_tokens(1), PAGE_SIZE, [3, 7], 0))
    changed = pool.memory != first_bytes
    assert [page for page in range(64) if changed[page].any()] == [7]
    layout = model.identity(PageFormat.BF16, PAGE_SIZE).layout
    assert 0 < changed[7].sum() <= layout.token_bytes  # one token of a page, in every layer


def test_logits_of_any_rows() -> None:
    model, tokens = tiny_model("llama"), random_tokens(40)
    pool = ScratchPool(model, PageFormat.NVFP4, PrefillAttends.FRESH)
    rows = torch.tensor([3, 0, 39])
    logits = model.forward(pool.batch(prefill(tokens, pages_for(40))), rows)
    torch.testing.assert_close(logits, plain_logits(model, tokens)[rows], **EXACT)
