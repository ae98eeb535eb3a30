"""Sessions of coding agents, one a line, with delta-coded ids of blocks that are local to the session.

    {"id": "trace_0001", "block_size": 64, "tool_tokens": 12974, "system_tokens": 4243, "requests": [
        {"t": 0.0, "in": 71175, "out": 169, "think_time": 0.0, "keep": 0, "new": [[1, 1112]]}, ...]}

A request's ids are the first `keep` of the request before it, followed by `new`, runs of [first id, count]. An entry of
the type `subagent` has requests of its own, a chain of its own, with times that count from its start. They are replayed
among the session's own in the order of their times.

Ids say nothing across sessions. There, prompts are taken to begin with the same tools where `tool_tokens` are as many,
and to go on with the same system prompt where `system_tokens` are as many too. Tokens behind the last whole block are
no other request's.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.replay.tokens import Tokens, Words, block_keys, block_tokens, seed_of
from kvtier.replay.trace import Request, Session

_NO_TOKENS: Tokens = np.empty(0, dtype=np.uint32)

Ids = npt.NDArray[np.int64]


class _Turn(NamedTuple):
    """A request as recorded; `sent_s` counts from the start of its session."""

    sent_s: float
    num_tokens: int
    num_output: int
    think_s: float
    num_kept: int
    new_ids: Ids


class _Chain(NamedTuple):
    """Requests whose ids are coded one after the other. `name` is the chain's alone, `session` may have several."""

    name: str
    session: str
    block_size: int
    num_tool_tokens: int
    num_system_tokens: int
    turns: list[_Turn]


def read_sessions(records: Iterable[dict[str, Any]]) -> Iterator[Session]:
    """A session for each record that has requests."""
    for record in records:
        chains = list(_chains(record))
        if any(chain.turns for chain in chains):
            yield Session(record["id"], functools.partial(_requests, chains))


def _chains(record: Mapping[str, Any]) -> Iterator[_Chain]:
    session = record["id"]
    starts = [(session, 0.0, record)]
    for number, entry in enumerate(record["requests"]):
        if entry["type"] == "subagent":
            starts.append((f"{session}/{number}", float(entry["t"]), entry))
    for name, start_s, entry in starts:
        turns = _turns(name, start_s, entry["requests"])
        yield _Chain(name, session, record["block_size"], entry["tool_tokens"], entry["system_tokens"], turns)


def _turns(chain: str, start_s: float, entries: Sequence[Mapping[str, Any]]) -> list[_Turn]:
    turns: list[_Turn] = []
    num_blocks = 0
    for entry in entries:
        if entry["type"] == "subagent":
            continue
        num_kept, new_ids = entry["keep"], _expand(entry["new"])
        if num_kept > num_blocks:
            raise ValueError(f"request {len(turns)} of {chain} keeps {num_kept} blocks of {num_blocks}")
        num_blocks = num_kept + new_ids.size
        think_s = float(entry.get("think_time", 0.0))  # some of the first requests behind a start lack it
        turns.append(_Turn(start_s + entry["t"], entry["in"], entry["out"], think_s, num_kept, new_ids))
    return turns


def _expand(runs: Sequence[tuple[int, int]]) -> Ids:
    return np.concatenate([np.empty(0, np.int64), *(np.arange(first, first + count) for first, count in runs)])


def _requests(chains: Sequence[_Chain]) -> Iterator[Request]:
    timed = heapq.merge(*map(_timed_requests, chains), key=lambda item: item[0])
    return (request for _, request in timed)


def _timed_requests(chain: _Chain) -> Iterator[tuple[float, Request]]:
    """Requests of a chain and when they were sent."""
    prefix = _NO_TOKENS
    shared = _SharedBlocks.of(chain)
    for number, turn in enumerate(chain.turns):
        new = block_tokens(shared.keys(seed_of("weka", chain.session), turn.new_ids), chain.block_size)
        prefix = np.concatenate([prefix[: turn.num_kept * chain.block_size], new])
        tail_key = np.array([seed_of("weka tail", chain.name, number)], dtype=np.uint64)
        prompt = np.concatenate([prefix, block_tokens(tail_key, max(0, turn.num_tokens - prefix.size))])
        yield turn.sent_s, Request(prompt, turn.num_output, turn.think_s)


class _SharedBlocks(NamedTuple):
    """The blocks of a chain that other sessions may have too: `ids`, ascending, and what they are known by."""

    ids: Ids
    known_by: Words

    @classmethod
    def of(cls, chain: _Chain) -> _SharedBlocks:
        """Whole blocks of tools and system prompt, with which the first request begins."""
        num_tools = chain.num_tool_tokens // chain.block_size
        num_shared = (chain.num_tool_tokens + chain.num_system_tokens) // chain.block_size
        ids = chain.turns[0].new_ids[:num_shared] if chain.turns else _expand([])
        places = np.arange(ids.size)
        tools = block_keys(seed_of("tools", chain.num_tool_tokens), places[:num_tools])
        system = block_keys(seed_of("system", chain.num_tool_tokens, chain.num_system_tokens), places[num_tools:])
        order = np.argsort(ids)
        return cls(ids[order], np.concatenate([tools, system])[order])

    def keys(self, session_seed: int, ids: Ids) -> Words:
        """A key for each of these ids of the session."""
        keys = block_keys(session_seed, ids)
        if self.ids.size:
            places = np.minimum(np.searchsorted(self.ids, ids), self.ids.size - 1)
            is_shared = self.ids[places] == ids
            keys[is_shared] = self.known_by[places[is_shared]]
        return keys
