"""Open pages and recipes: what every token sees, and what is written when."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lockstep import Lockstep
from random_recipes import random_recipe
from scratch_pool import BF16_BOUND, UNTOUCHED, ScratchPool, pages_for
from tiny_models import ARCHITECTURES, PAGE_SIZE, plain_logits, random_tokens, tiny_model

from kvtier.ops.reference.codec import encode
from kvtier.pages.layout import PageFormat, PageLayout
from kvtier.pages.recipe import RecipeName
from kvtier.worker.chunk import Chunk
from kvtier.worker.open_pages import OpenPageStore
from kvtier.worker.options import OpenPage, PrefillAttends

CUTS = {
    "whole": (0, 70),
    "between pages": (0, 5, 37, 48, 64, 70),
    "decoded": (0, 14, *range(15, 36), 70),
}
"""Where a sequence of 70 tokens is cut into chunks; those of one token, the first aside, are decodes."""
QUANTIZED = PrefillAttends.QUANTIZED


@pytest.mark.parametrize("open_page", OpenPage)
@pytest.mark.parametrize("name", RecipeName)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_every_token_sees_what_it_should(architecture: str, name: RecipeName, open_page: OpenPage) -> None:
    """However a sequence is cut into chunks, attention is plain attention on the values of the right kind."""
    model, tokens = tiny_model(architecture), random_tokens(70)
    recipe = random_recipe(name, model)
    for cuts in CUTS.values():
        Lockstep(ScratchPool(model, PageFormat.NVFP4, QUANTIZED, open_page, recipe), tokens, cuts)
    fresh = ScratchPool(model, PageFormat.NVFP4, PrefillAttends.FRESH, open_page, recipe)
    Lockstep(fresh, tokens, CUTS["between pages"])


@pytest.mark.parametrize("open_page", OpenPage)
@pytest.mark.parametrize("page_format", [PageFormat.FP8, PageFormat.BF16])
def test_every_page_format_has_recipes_and_open_pages(page_format: PageFormat, open_page: OpenPage) -> None:
    model, tokens = tiny_model("gemma3"), random_tokens(70)
    for name, cuts in zip((RecipeName.PLAIN, RecipeName.BALANCED, RecipeName.FULL), CUTS.values(), strict=True):
        recipe = random_recipe(name, model)
        Lockstep(ScratchPool(model, page_format, QUANTIZED, open_page, recipe), tokens, cuts)


@pytest.mark.parametrize("name", [RecipeName.BALANCED, RecipeName.FULL])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_transform_leaves_logits_as_they_are(architecture: str, name: RecipeName) -> None:
    """Where K and V keep 8 bits of their mantissa, in whatever space."""
    model, tokens = tiny_model(architecture), random_tokens(70)
    for attends in PrefillAttends:
        pool = ScratchPool(model, PageFormat.BF16, attends, OpenPage.BF16, random_recipe(name, model))
        logits = Lockstep(pool, tokens, CUTS["decoded"]).logits
        torch.testing.assert_close(logits, plain_logits(model, tokens), rtol=0, atol=2 * BF16_BOUND)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("open_page", OpenPage)
@pytest.mark.parametrize("name", RecipeName)
def test_pages_hold_the_codes_of_whole_pages(name: RecipeName, open_page: OpenPage, cuts: str) -> None:
    """Byte for byte, however the tokens came; what is not a whole page is not in the pool."""
    model, pages = tiny_model("qwen3"), [5, 2, 9, 4, 7]
    recipe = random_recipe(name, model)
    pool = ScratchPool(model, PageFormat.NVFP4, PrefillAttends.FRESH, open_page, recipe)
    held = Lockstep(pool, random_tokens(70), CUTS[cuts], pages).held
    for layer, (view, tokens) in enumerate(zip(pool.pages.views, held, strict=True)):
        assert tokens.shape[1] == 70, layer
        for index, page in enumerate(pages[:4]):
            of_page = tokens[:, index * PAGE_SIZE : (index + 1) * PAGE_SIZE].transpose(1, 2)
            codes, scales = encode(of_page, PageFormat.NVFP4, 1.0, recipe.block_scales)
            assert torch.equal(torch.stack((view.k_data[page], view.v_data[page])), codes)
            written = torch.stack((view.k_scales[page], view.v_scales[page]))
            assert torch.equal(written.view(torch.uint8), scales.view(torch.uint8))
    open_pages = [7] if open_page is OpenPage.OFF else []
    assert pool.touched_pages() == sorted([*pages[:4], *open_pages])


@pytest.mark.parametrize("open_page", [OpenPage.BF16, OpenPage.FP8])
def test_a_page_is_written_once_and_whole(open_page: OpenPage) -> None:
    model, tokens, pages = tiny_model("llama"), random_tokens(2 * PAGE_SIZE + 1), [6, 3, 8]
    pool = ScratchPool(model, PageFormat.NVFP4, PrefillAttends.FRESH, open_page)
    pool.logits(Chunk(tokens[:3], 0, pages, 0))
    for position in range(3, len(tokens)):
        before = pool.memory.copy()
        pool.logits(Chunk(tokens[position : position + 1], position, pages, 0))
        full, rest = divmod(position + 1, PAGE_SIZE)
        assert pool.touched_pages() == sorted(pages[:full])
        if rest:
            assert np.array_equal(pool.memory, before)
    for page in pages[:2]:  # no byte of them is as it was before, save where a code is the same by chance
        assert (pool.memory[page] == UNTOUCHED).mean() < 0.05


def test_slots_hold_pages_of_their_own() -> None:
    """Two sequences that take turns compute what each computes alone."""
    model, lengths = tiny_model("llama"), (37, 41)
    sequences = [random_tokens(length, seed) for seed, length in enumerate(lengths)]
    pages = [pages_for(length, 8 * index) for index, length in enumerate(lengths)]
    pool, alone = (ScratchPool(model, PageFormat.NVFP4, QUANTIZED) for _ in range(2))
    for start in range(0, 35, 5):
        chunks = [
            Chunk(tokens[start : start + 5], start, own, 2 + index)
            for index, (tokens, own) in enumerate(zip(sequences, pages, strict=True))
        ]
        together = pool.logits(*chunks)
    for index, tokens in enumerate(sequences):
        logits = [alone.logits(Chunk(tokens[start : start + 5], start, pages[index], 0)) for start in range(0, 35, 5)]
        torch.testing.assert_close(together[index], logits[-1][0], rtol=0, atol=0.02)


@pytest.mark.parametrize("open_page", OpenPage)
def test_what_a_store_keeps(open_page: OpenPage) -> None:
    layout = PageLayout(PageFormat.NVFP4, 2, 2, 16, PAGE_SIZE)
    store = OpenPageStore(layout, open_page, 3)
    tokens = torch.tensor([1.0, 1.0 + 2**-8, 1e4, -3.3]).view(1, 4, 1, 1).expand(2, 4, 2, 16)
    kept = {
        OpenPage.BF16: [1.0, 1.0, 9984.0, -3.296875],
        OpenPage.FP8: [1.0, 1.0, 448.0, -3.25],
        OpenPage.OFF: tokens[0, :, 0, 0].tolist(),
    }[open_page]
    assert store.rounded(tokens)[1, :, 1, 7].tolist() == kept
    assert store.num_in_pages(40) == (40 if open_page is OpenPage.OFF else 32)
    if open_page is OpenPage.OFF:
        assert store.tail(1, torch.tensor([2]), torch.tensor([4], dtype=torch.int32)) is None
        return
    store.write(1, torch.tensor([32, 33, 34, 35]), store.rounded(tokens))
    assert store.read(1, torch.tensor([35, 32]))[0, :, 1, 3].tolist() == [kept[3], kept[0]]
    tail = store.tail(1, torch.tensor([0, 2]), torch.tensor([0, 4], dtype=torch.int32))
    assert tail is not None
    assert tail.key.dtype is tail.value.dtype is torch.bfloat16
    assert tail.value.shape == (2, PAGE_SIZE, 2, 16)
    assert tail.value[1, :4, 0, 0].tolist() == kept
    assert store.read(0, torch.tensor([32]))[0].count_nonzero() == 0  # another layer


def test_a_store_gives_every_slot_once() -> None:
    store = OpenPageStore(PageLayout(PageFormat.NVFP4, 1, 1, 16, PAGE_SIZE), OpenPage.BF16, 3)
    slots = [store.take_slot() for _ in range(3)]
    assert sorted(slots) == [0, 1, 2]
    store.give_back(slots[1])
    assert store.take_slot() == slots[1]
