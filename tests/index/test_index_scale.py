"""A tree of 200,000 pages: right answers, and few nodes to visit for a long prompt."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from index_helpers import root
from plain_model import PAGE_SIZE

from kvtier.index import NO_SLOT, Cursor, LruPolicy, PageIndex
from kvtier.pages.chain import Extras, chain_keys

SYSTEM_PAGES, DOCUMENT_PAGES = 50, 100
NUM_SYSTEMS, DOCUMENTS_PER_SYSTEM = 40, 50
NUM_DOCUMENTS = NUM_SYSTEMS * DOCUMENTS_PER_SYSTEM
NUM_PAGES = NUM_SYSTEMS * SYSTEM_PAGES + NUM_DOCUMENTS * DOCUMENT_PAGES
STRIDE = 4 * PAGE_SIZE


class Corpus:
    """Documents of random tokens, each behind one of some system prompts; each page is in the tree once."""

    def __init__(self) -> None:
        random = np.random.default_rng(1)

        def pages(count: int) -> bytes:
            return random.integers(0, 50_000, count * PAGE_SIZE, dtype=np.uint32).tobytes()

        self.systems = [pages(SYSTEM_PAGES) for _ in range(NUM_SYSTEMS)]
        self.documents = [[pages(DOCUMENT_PAGES) for _ in range(DOCUMENTS_PER_SYSTEM)] for _ in range(NUM_SYSTEMS)]

    def prompts(self) -> Iterator[tuple[int, int, bytes]]:
        """Every prompt, with the numbers of its system prompt and document; neighbours share nothing."""
        for document in range(DOCUMENTS_PER_SYSTEM):
            for system in range(NUM_SYSTEMS):
                yield system, document, self.systems[system] + self.documents[system][document]


def publish(index: PageIndex, start: Cursor, tokens: bytes, extras: Extras | None = None) -> Cursor:
    """Commits tokens behind a cursor, as a lease does that is released at once; returns the end."""
    known = index.tree.match(start, tokens, extras or {})
    lease = index.leases.open(1, "a", known.end, [known.device_slots()])
    rest = tokens[known.num_pages * STRIDE :]
    slots = index.device.allocate(len(rest) // STRIDE)
    lease.reserved.update(slots.tolist())
    keys = chain_keys(index.tree.parent_key(known.end), rest, PAGE_SIZE, extras or {}, known.end.depth)
    index.commit(lease, rest, keys, extras or {}, slots)
    index.leases.release(lease)
    return lease.end


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus()


@pytest.fixture(scope="module")
def full_index(corpus: Corpus) -> PageIndex:
    index = PageIndex(PAGE_SIZE, NUM_PAGES, 0, LruPolicy())
    for _, _, tokens in corpus.prompts():
        publish(index, root(index.tree), tokens)
    return index


def test_every_prompt_is_found_whole_on_its_own_pages(corpus: Corpus, full_index: PageIndex) -> None:
    tree = full_index.tree
    assert (tree.num_pages, tree.num_nodes) == (202_000, NUM_SYSTEMS + NUM_DOCUMENTS)
    system_slots: dict[int, list[int]] = {}
    seen: set[int] = set()
    for system, _, tokens in corpus.prompts():
        match = tree.match(root(tree), tokens, {})
        assert (match.num_pages, len(match.segments)) == (SYSTEM_PAGES + DOCUMENT_PAGES, 2)
        slots = match.device_slots().tolist()
        assert NO_SLOT not in slots
        assert system_slots.setdefault(system, slots[:SYSTEM_PAGES]) == slots[:SYSTEM_PAGES]
        assert seen.isdisjoint(slots[SYSTEM_PAGES:])
        seen.update(slots[SYSTEM_PAGES:])
    assert len(seen) == NUM_DOCUMENTS * DOCUMENT_PAGES
    full_index.check_integrity()


def test_a_prompt_is_found_up_to_its_first_unknown_page(corpus: Corpus, full_index: PageIndex) -> None:
    tree = full_index.tree
    random = np.random.default_rng(2)
    prompts = list(corpus.prompts())
    for number in random.integers(0, len(prompts), 300):
        tokens = np.frombuffer(prompts[number][2], dtype=np.uint32).copy()
        position = int(random.integers(tokens.size))
        tokens[position] += 1
        match = tree.match(root(tree), tokens.tobytes(), {})
        assert match.num_pages == position // PAGE_SIZE
        assert len(match.segments) == (0 if position < PAGE_SIZE else 1 + (match.num_pages > SYSTEM_PAGES))


def test_pages_of_one_prompt_go_while_all_others_stay(corpus: Corpus, full_index: PageIndex) -> None:
    index = full_index
    first, second = (tokens for _, _, tokens in list(corpus.prompts())[:2])
    (run,) = index.take_device_victims(DOCUMENT_PAGES)
    index.device.release(run.device)
    assert index.drop_device(run) == DOCUMENT_PAGES
    assert index.tree.match(root(index.tree), first, {}).num_pages == SYSTEM_PAGES
    assert index.tree.match(root(index.tree), second, {}).num_pages == SYSTEM_PAGES + DOCUMENT_PAGES
    assert index.tree.num_pages == NUM_PAGES - DOCUMENT_PAGES
    publish(index, root(index.tree), first)
    assert index.tree.match(root(index.tree), first, {}).num_pages == SYSTEM_PAGES + DOCUMENT_PAGES
    index.check_integrity()


def test_a_long_prompt_committed_page_by_page_is_one_node() -> None:
    index = PageIndex(PAGE_SIZE, 2_048, 0, LruPolicy())
    tokens = np.random.default_rng(3).integers(0, 50_000, 2_048 * PAGE_SIZE, dtype=np.uint32).tobytes()
    end = root(index.tree)
    for page in range(0, 2_048, 4):
        end = publish(index, end, tokens[page * STRIDE : (page + 4) * STRIDE])
    match = index.tree.match(root(index.tree), tokens, {})
    assert (match.num_pages, len(match.segments), index.tree.num_nodes) == (2_048, 1, 1)


def test_a_conversation_visits_at_most_one_node_a_turn() -> None:
    num_turns, pages_a_turn = 40, 50
    index = PageIndex(PAGE_SIZE, num_turns * pages_a_turn, 0, LruPolicy())
    tokens = np.random.default_rng(4).integers(0, 50_000, 2_000 * PAGE_SIZE, dtype=np.uint32).tobytes()
    for turn in range(1, num_turns + 1):
        prompt = tokens[: turn * pages_a_turn * STRIDE]
        publish(index, root(index.tree), prompt)
        # A prompt is asked for without its last page: at least one token must be computed anew.
        index.touch(index.tree.match(root(index.tree), prompt[:-STRIDE], {}).end)
    match = index.tree.match(root(index.tree), tokens, {})
    assert match.num_pages == 2_000
    assert len(match.segments) <= num_turns + 1
    index.check_integrity()
