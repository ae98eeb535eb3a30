"""How the demo shows its turns and totals, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from kvtier.client import TokensByTier
from kvtier.demo.conversation import Turn

_MILLISECONDS = 1000


def turns_table(turns: Sequence[Turn], title: str) -> Table:
    """One row a turn."""
    table = Table(title=title, caption="tokens found by tier; time to first token (TTFT) in milliseconds")
    table.add_column("who")
    table.add_column("tenant")
    for heading in ("turn", "prompt", "device", "host", "redis", "computed", "TTFT", "no cache"):
        table.add_column(heading, justify="right")
    table.add_column("question and reply", ratio=1)
    for turn in turns:
        figures = (turn.number, turn.prompt_tokens, *turn.found, turn.computed_tokens)
        times = (turn.first_token_s, turn.cold_first_token_s)
        table.add_row(
            turn.visitor,
            turn.tenant,
            *(str(figure) for figure in figures),
            *(f"{seconds * _MILLISECONDS:,.0f}" for seconds in times),
            f"[italic]{turn.question}[/italic] {turn.reply}",
            style="red" if turn.is_missed else None,
        )
    return table


def totals(turns: Sequence[Turn], transferred: Mapping[str, int]) -> dict[str, Any]:
    """Sums over all turns. Times to first token are compared where a cached prefix was there to be found."""
    found = {tier: sum(turn.found._asdict()[tier] for turn in turns) for tier in TokensByTier._fields}
    asked = sum(turn.prompt_tokens for turn in turns)
    hits = [turn for turn in turns if turn.expected_tokens]
    warm_s = sum(turn.first_token_s for turn in hits) / len(hits)
    cold_s = sum(turn.cold_first_token_s for turn in hits) / len(hits)
    return {
        "prompt_tokens": asked,
        "found_tokens": found,
        "computed_tokens": sum(turn.computed_tokens for turn in turns),
        "hit_rate": sum(found.values()) / asked,
        "transferred_bytes": dict(transferred),
        "mean_first_token_s": warm_s,
        "mean_cold_first_token_s": cold_s,
        "first_token_speedup": cold_s / warm_s,
        "missed_turns": sum(turn.is_missed for turn in turns),
    }


def totals_lines(figures: Mapping[str, Any]) -> list[str]:
    """The totals for people."""
    found = ", ".join(f"{tier} {tokens:,}" for tier, tokens in figures["found_tokens"].items())
    moved = ", ".join(f"{route} {num / 2**20:.1f} MiB" for route, num in figures["transferred_bytes"].items())
    return [
        f"prompt tokens {figures['prompt_tokens']:,}: found {figures['hit_rate']:.0%} ({found}), "
        f"computed {figures['computed_tokens']:,}",
        f"moved between tiers: {moved}",
        f"mean time to first token of turns with a cached prefix: {figures['mean_first_token_s']:.3f} s, "
        f"without a cache {figures['mean_cold_first_token_s']:.3f} s ({figures['first_token_speedup']:.1f} times)",
    ]


def as_json(turns: Sequence[Turn], figures: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, as one document."""
    return {"turns": [{**turn._asdict(), "found": turn.found._asdict()} for turn in turns], "totals": dict(figures)}


def faults(turns: Sequence[Turn]) -> list[str]:
    """What should have been found and was not, and the tiers that took no part."""
    missed = [
        f"{turn.visitor}'s turn {turn.number} found {turn.found.total} tokens of {turn.expected_tokens} computed before"
        for turn in turns
        if turn.is_missed
    ]
    unused = [tier for tier in TokensByTier._fields if not any(turn.found._asdict()[tier] for turn in turns)]
    return missed + [f"no page ever came from {tier}" for tier in unused]
