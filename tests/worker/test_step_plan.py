"""Which tokens of which sequence a step computes."""

from __future__ import annotations

import pytest

from kvtier.errors import InvalidRequestError
from kvtier.worker.options import WorkerOptions
from kvtier.worker.request import Request
from kvtier.worker.scheduler import plan_step
from kvtier.worker.sequence import Sequence


def running(number: int, num_tokens: int, num_computed: int) -> Sequence:
    sequence = Sequence(Request("tenant", range(1, num_tokens + 1), 8), number, page_size=16)
    sequence.num_computed = num_computed
    return sequence


def plan(sequences: list[Sequence], max_tokens: int) -> list[tuple[int, int, int]]:
    return [(p.sequence.number, p.chunk.start, p.chunk.end) for p in plan_step(sequences, max_tokens)]


def test_decodes_come_before_prefills() -> None:
    sequences = [running(0, 100, 0), running(1, 20, 19), running(2, 30, 16), running(3, 9, 8)]
    assert plan(sequences, 512) == [(1, 19, 20), (3, 8, 9), (0, 0, 100), (2, 16, 30)]


def test_a_long_prompt_gets_what_decodes_leave() -> None:
    sequences = [running(0, 100, 40), running(1, 20, 19), running(2, 30, 0)]
    assert plan(sequences, 32) == [(1, 19, 20), (0, 40, 71)]


def test_what_is_left_goes_to_the_next_prompt() -> None:
    sequences = [running(0, 20, 0), running(1, 100, 16)]
    assert plan(sequences, 32) == [(0, 0, 20), (1, 16, 28)]


def test_a_chunk_of_one_token_behind_a_prefix_is_a_decode() -> None:
    """It attends to pages, so it stands before prefills in the row, whatever cut it short."""
    sequences = [running(0, 31, 0), running(1, 100, 16)]
    assert plan(sequences, 32) == [(1, 16, 17), (0, 0, 31)]


def test_a_prompt_of_one_token_is_a_prefill() -> None:
    sequences = [running(0, 1, 0), running(1, 20, 19)]
    assert plan(sequences, 32) == [(1, 19, 20), (0, 0, 1)]


def test_a_step_has_room_for_every_sequence_and_more() -> None:
    with pytest.raises(InvalidRequestError, match="step_tokens is 8 and max_sequences 8"):
        WorkerOptions(step_tokens=8, max_sequences=8)
