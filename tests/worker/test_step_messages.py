"""What the other ranks are told is what rank 0 computes, however pages grow and slots change hands."""

from __future__ import annotations

import numpy as np

from kvtier.worker.chunk import Chunk
from kvtier.worker.request import Request
from kvtier.worker.sequence import Sequence
from kvtier.worker.step_messages import Step, StepDecoder, StepEncoder

NUM_SLOTS = 5


def test_decoded_steps_are_the_steps() -> None:
    random = np.random.default_rng(3)
    encoder, decoder = StepEncoder(), StepDecoder()
    pages: list[list[int]] = [[] for _ in range(NUM_SLOTS)]
    same_list: dict[int, list[int]] = {}
    for number in range(300):
        chunks = []
        for slot in sorted(random.choice(NUM_SLOTS, random.integers(1, NUM_SLOTS + 1), replace=False).tolist()):
            is_new = not pages[slot] or random.integers(10) == 0  # another sequence has the slot
            if is_new:
                pages[slot] = []
            pages[slot] += random.integers(0, 2**31, random.integers(0 if pages[slot] else 1, 4)).tolist()
            tokens = random.integers(0, 2**18, random.integers(1, 4)).tolist()
            chunks.append(Chunk(tokens, int(random.integers(2**20)), pages[slot], slot, bool(random.integers(2))))
        step = Step(f"pool {number // 100}", number / 7, chunks)
        decoded = decoder.decode(encoder.encode(step))
        assert decoded == step
        for chunk, sent in zip(decoded.chunks, chunks, strict=True):
            # Tables on the device are brought up to date from the first new page on as long as the list is the same.
            known = same_list.get(chunk.open_slot)
            assert (chunk.pages is known) == (known is not None and len(known) > 0 and sent.pages[0] == known[0])
            same_list[chunk.open_slot] = chunk.pages  # type: ignore[assignment]


def test_prompts_may_be_of_numpy_integers() -> None:
    sequence = Sequence(Request("tenant", list(np.arange(3, 9, dtype=np.uint32)), 2), 0, page_size=16)
    step = Step("pool", 0.0, [sequence.chunk(4)])
    decoded = StepDecoder().decode(StepEncoder().encode(step))
    assert decoded.chunks[0].tokens == [3, 4, 5, 6]


def test_a_step_that_adds_no_page_is_small() -> None:
    encoder = StepEncoder()
    pages = list(range(4000))
    first = encoder.encode(Step("pool", 3.5, [Chunk([1], 250_000, pages, 0)]))
    assert len(first) > 4000
    assert len(encoder.encode(Step("pool", 3.5, [Chunk([2], 250_001, pages, 0)]))) < 50
