"""Small traces in every format, written by the tests."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BLOCK = 64


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> Path:
    """One JSON document a line; packed if the name ends with .xz."""
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)
    return path


def weka_turn(t: float, tokens: int, output: int, keep: int, new: list[list[int]], **fields: Any) -> dict[str, Any]:
    """A request of a coding agent's session."""
    return {"t": t, "type": "n", "in": tokens, "out": output, "keep": keep, "new": new} | fields


def weka_session(name: str, requests: list[dict[str, Any]], tools: int = 0, system: int = 0) -> dict[str, Any]:
    """A session with blocks of 64 tokens."""
    return {"id": name, "block_size": BLOCK, "tool_tokens": tools, "system_tokens": system, "requests": requests}


def growing_session(name: str, num_turns: int, blocks: int = 10, think_s: float = 5.0) -> dict[str, Any]:
    """A session whose every prompt has the one before it and `blocks` blocks more, and shares nothing with others."""
    turns = [
        weka_turn(
            t=think_s * number,
            tokens=(number + 1) * blocks * BLOCK + 7,
            output=20,
            keep=number * blocks,
            new=[[1 + number * blocks, blocks]],
            think_time=think_s if number else 0.0,
        )
        for number in range(num_turns)
    ]
    return weka_session(name, turns)
