"""Forward passes over pages, without a daemon: what a batch computes, and what it writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scratch_pool import ScratchPool, pages_for, prefill
from tiny_models import ARCHITECTURES, PAGE_SIZE, plain_logits, random_tokens, tiny_model

from kvtier.pages.layout import PageFormat
from kvtier.worker.batch import Chunk
from kvtier.worker.options import PrefillAttends

EXACT = {"rtol": 1e-4, "atol": 1e-4}
"""Nothing but the order of fp32 sums differs; logits of these models reach from -10 to 10."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_first_prefill_computes_what_plain_attention_computes(architecture: str) -> None:
    model, tokens = tiny_model(architecture), random_tokens(90)
    for page_format in PageFormat:  # the first prefill attends to fresh values: the format does not matter
        logits = ScratchPool(model, page_format, PrefillAttends.FRESH).logits(prefill(tokens, pages_for(90)))
        torch.testing.assert_close(logits[0], plain_logits(model, tokens)[-1], **EXACT)


@pytest.mark.parametrize("page_format", PageFormat)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_quantized_prefill_equals_extend_and_decode(architecture: str, page_format: PageFormat) -> None:
    """However the tokens are cut into chunks, all of them see the values that pages give back."""
    model, tokens, pages = tiny_model(architecture), random_tokens(70), pages_for(70)
    whole = ScratchPool(model, page_format, PrefillAttends.QUANTIZED).logits(prefill(tokens, pages))
    for cuts in ([0, 37, 70], [0, 16, 32, 69, 70], [0, 67, 68, 69, 70]):
        pool = ScratchPool(model, page_format, PrefillAttends.QUANTIZED)
        for start, end in zip(cuts, cuts[1:], strict=False):
            logits = pool.logits(Chunk(tokens[start:end], start, pages, 0))
        torch.testing.assert_close(logits, whole, **EXACT)


def test_quantized_differs_from_fresh_by_the_quantisation() -> None:
    model, tokens, pages = tiny_model("llama"), random_tokens(70), pages_for(70)
    fresh = ScratchPool(model, PageFormat.NVFP4, PrefillAttends.FRESH).logits(prefill(tokens, pages))
    quantized = ScratchPool(model, PageFormat.NVFP4, PrefillAttends.QUANTIZED).logits(prefill(tokens, pages))
    assert (fresh - quantized).abs().max() > 0.1


@pytest.mark.parametrize("attends", PrefillAttends)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_sequences_do_not_see_each_other(architecture: str, attends: PrefillAttends) -> None:
    """Two decodes, an extend and two first prefills in one row, against each of them alone."""
    model = tiny_model(architecture)
    pool = ScratchPool(model, PageFormat.NVFP4, attends)
    lengths = (40, 17, 50, 33, 1)
    sequences = [random_tokens(length, seed) for seed, length in enumerate(lengths)]
    pages = [pages_for(length, 8 * index) for index, length in enumerate(lengths)]
    starts = (39, 16, 20, 0, 0)
    for index in range(3):
        pool.logits(prefill(sequences[index][: starts[index]], pages[index]))
    chunks = [Chunk(tokens[start:], start, own, 0) for tokens, start, own in zip(sequences, starts, pages, strict=True)]
    packed = pool.logits(*chunks)
    for row, chunk in zip(packed, chunks, strict=True):
        torch.testing.assert_close(row, pool.logits(chunk)[0], **EXACT)


@pytest.mark.parametrize("page_format", PageFormat)
def test_last_token_of_a_matched_prompt_is_read_and_not_written(page_format: PageFormat) -> None:
    model, tokens, pages = tiny_model("qwen3"), random_tokens(2 * PAGE_SIZE), pages_for(2 * PAGE_SIZE)
    pool = ScratchPool(model, page_format, PrefillAttends.QUANTIZED)
    whole = pool.logits(prefill(tokens, pages))
    before = pool.memory.copy()
    again = pool.logits(Chunk(tokens[-1:], len(tokens) - 1, pages, first_written=len(tokens)))
    assert np.array_equal(pool.memory, before)
    torch.testing.assert_close(again, whole, **EXACT)


def test_writes_its_own_slots_and_nothing_else() -> None:
    model = tiny_model("llama")
    pool = ScratchPool(model, PageFormat.BF16, PrefillAttends.FRESH)
    pool.logits(Chunk(random_tokens(PAGE_SIZE), 0, [3], 0), Chunk(random_tokens(PAGE_SIZE), 0, [5], 0))
    touched = [page for page in range(64) if (pool.memory[page] != 0xAA).any()]
    assert touched == [3, 5]
    first_bytes = pool.memory.copy()
    pool.logits(Chunk(random_tokens(1), PAGE_SIZE, [3, 7], 0))
    changed = pool.memory != first_bytes
    assert [page for page in range(64) if changed[page].any()] == [7]
    layout = model.identity(PageFormat.BF16, PAGE_SIZE).layout
    assert 0 < changed[7].sum() <= layout.token_bytes  # one token of a page, in every layer
