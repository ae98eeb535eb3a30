"""A decode batch of fixed size computes what a packed batch made for the step computes: here on the CPU, eagerly."""

from __future__ import annotations

import pytest
import torch
from random_recipes import random_recipe
from scratch_pool import UNTOUCHED, ScratchPool, pages_for, prefill
from tiny_models import ARCHITECTURES, PAGE_SIZE, random_tokens, tiny_model

from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import PLAIN, RecipeName
from kvtier.worker.chunk import Chunk
from kvtier.worker.decode_batch import DecodeBatch
from kvtier.worker.options import OpenPage, PrefillAttends

ROUNDED = {"rtol": 0.0, "atol": 0.02}
"""fp32 sums in another order, which now and then round a value to the neighbouring code. Quantisation does 0.5."""
NUM_ROWS = 6
MAX_PAGES = 4


class TwoPools:
    """The same sequences in two pools: one decoded by packed batches, one by a decode batch."""

    def __init__(
        self, architecture: str, page_format: PageFormat, open_page: OpenPage, recipe_name: RecipeName
    ) -> None:
        self.model = tiny_model(architecture)
        recipe = PLAIN if recipe_name is RecipeName.PLAIN else random_recipe(recipe_name, self.model)
        self.packed, self.fixed = (
            ScratchPool(self.model, page_format, PrefillAttends.FRESH, open_page, recipe) for _ in range(2)
        )
        self.batch = DecodeBatch(NUM_ROWS, MAX_PAGES, self.fixed.pages, self.fixed.open_pages)

    def prefill(self, chunk: Chunk) -> None:
        for pool in (self.packed, self.fixed):
            pool.logits(chunk)

    def decode(self, *chunks: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        self.batch.fill(chunks)
        of_rows = self.model.forward(self.batch)
        assert of_rows.shape[0] == NUM_ROWS
        return of_rows[[chunk.open_slot for chunk in chunks]], self.packed.logits(*chunks)


@pytest.mark.parametrize("open_page", OpenPage)
@pytest.mark.parametrize("page_format", PageFormat)
def test_sequences_that_join_and_leave_across_pages(page_format: PageFormat, open_page: OpenPage) -> None:
    pools = TwoPools("llama", page_format, open_page, RecipeName.PLAIN)
    sequences = {slot: random_tokens(MAX_PAGES * PAGE_SIZE, seed=slot) for slot in (0, 2, 5)}
    lengths = {0: 15, 2: 20, 5: 30}  # of the prompts; slot 2 joins at step 4 and slot 0 leaves at step 12
    pages = {slot: pages_for(MAX_PAGES * PAGE_SIZE, 8 * slot) for slot in sequences}
    first_step = {0: 0, 2: 4, 5: 0}
    for step in range(20):
        for slot in (slot for slot in sequences if first_step[slot] == step):
            pools.prefill(prefill(sequences[slot][: lengths[slot]], pages[slot], slot))
        running = [slot for slot in sequences if step >= first_step[slot] and not (slot == 0 and step >= 12)]
        chunks = [Chunk(sequences[slot][lengths[slot] :][:1], lengths[slot], pages[slot], slot) for slot in running]
        torch.testing.assert_close(*pools.decode(*chunks), **ROUNDED)
        for slot in running:
            lengths[slot] += 1
    differing = (pools.packed.memory != pools.fixed.memory).mean()
    assert differing < 1e-3, "pages hold other codes"
    assert pools.fixed.touched_pages() == pools.packed.touched_pages()


@pytest.mark.parametrize("name", [RecipeName.SEARCH, RecipeName.BALANCED, RecipeName.FULL])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures_with_recipes(architecture: str, name: RecipeName) -> None:
    pools = TwoPools(architecture, PageFormat.NVFP4, OpenPage.BF16, name)
    tokens, pages = random_tokens(60), pages_for(60)
    pools.prefill(prefill(tokens[:40], pages, 3))
    for position in range(40, 60):
        found, expected = pools.decode(Chunk(tokens[position : position + 1], position, pages, 3))
        torch.testing.assert_close(found, expected, **ROUNDED)


@pytest.mark.parametrize("open_page", OpenPage)
def test_a_shared_page_is_read_and_nothing_is_written(open_page: OpenPage) -> None:
    pools = TwoPools("qwen3", PageFormat.NVFP4, open_page, RecipeName.PLAIN)
    tokens, pages = random_tokens(2 * PAGE_SIZE), pages_for(2 * PAGE_SIZE)
    pools.prefill(prefill(tokens, pages, 1))
    before = pools.fixed.memory.copy()
    shared = Chunk(tokens[-1:], len(tokens) - 1, pages, 1, is_shared=True)
    torch.testing.assert_close(*pools.decode(shared), **ROUNDED)
    assert (pools.fixed.memory == before).all()


def test_rows_without_a_sequence_leave_open_pages_of_others_alone() -> None:
    """A sequence that is not in the step, because it prefills or has lost its lease, has a row in it nevertheless."""
    pools = TwoPools("llama", PageFormat.NVFP4, OpenPage.BF16, RecipeName.PLAIN)
    tokens = random_tokens(40)
    for slot in (0, 4):
        pools.prefill(prefill(tokens[:20], pages_for(40, 8 * slot), slot))
    held = pools.fixed.open_pages.first_slots(1, NUM_ROWS)[:, 4].clone()
    pools.decode(Chunk(tokens[20:21], 20, pages_for(40), 0))
    assert torch.equal(pools.fixed.open_pages.first_slots(1, NUM_ROWS)[:, 4], held)
    assert (pools.fixed.memory[pages_for(40, 32)[1:]] == UNTOUCHED).all()


def test_a_slot_that_gets_another_sequence_gets_its_pages() -> None:
    pools = TwoPools("llama", PageFormat.NVFP4, OpenPage.BF16, RecipeName.PLAIN)
    for index in range(3):
        tokens, pages = random_tokens(30, seed=index), pages_for(30, 10 * index)
        pools.prefill(prefill(tokens[:20], pages[:2], 0))
        growing = pages[:1]
        for position in range(20, 30):
            if position == 20:
                growing += pages[1:]
            torch.testing.assert_close(
                *pools.decode(Chunk(tokens[position : position + 1], position, growing, 0)), **ROUNDED
            )
