"""What the demo makes of its turns: totals, and the faults for which it fails."""

from __future__ import annotations

import pytest

from kvtier.client import TokensByTier
from kvtier.demo.conversation import Turn
from kvtier.demo.report import as_json, faults, totals


def turn(visitor: str, expected_tokens: int, found: TokensByTier, first_token_s: float = 0.5) -> Turn:
    return Turn(
        visitor=visitor,
        tenant="library",
        number=1,
        prompt_tokens=100,
        expected_tokens=expected_tokens,
        found=found,
        computed_tokens=100 - found.total,
        first_token_s=first_token_s,
        cold_first_token_s=2.0,
        question="Why?",
        reply="Because.",
    )


COLD = turn("Ada", 0, TokensByTier(0, 0, 0), first_token_s=2.1)
WARM = turn("Ben", 80, TokensByTier(48, 16, 16))


def test_totals() -> None:
    figures = totals([COLD, WARM, WARM], {"host_to_device": 4096})
    assert figures["prompt_tokens"] == 300
    assert figures["found_tokens"] == {"device": 96, "host": 32, "redis": 32}
    assert figures["computed_tokens"] == 140
    assert figures["hit_rate"] == pytest.approx(160 / 300)
    assert figures["first_token_speedup"] == pytest.approx(4.0)  # of the turns with a prefix to find
    assert (figures["missed_turns"], figures["transferred_bytes"]) == (0, {"host_to_device": 4096})
    document = as_json([WARM], figures)
    assert document["turns"][0]["found"] == {"device": 48, "host": 16, "redis": 16}


def test_a_run_in_which_everything_was_found_has_no_faults() -> None:
    assert faults([COLD, WARM]) == []


def test_a_turn_that_should_have_hit_is_a_fault() -> None:
    missed = turn("Cleo", 96, TokensByTier(48, 16, 16))
    assert faults([COLD, WARM, missed]) == ["Cleo's turn 1 found 80 tokens of 96 computed before"]


def test_a_tier_that_never_served_a_page_is_a_fault() -> None:
    assert faults([turn("Ben", 64, TokensByTier(64, 0, 0))]) == [
        "no page ever came from host",
        "no page ever came from redis",
    ]
