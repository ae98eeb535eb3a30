"""Conversations of tau-bench: OpenAI messages with their text.

    [{"task_id": 0, "trial": 0, "traj": [{"role": "system", "content": "..."}, ...]}, ...]

A request is everything before a message of the assistant; its output is that message. No times were recorded.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvtier.replay.tokens import text_tokens
from kvtier.replay.trace import Request, Session


class _Message(NamedTuple):
    is_reply: bool
    text: str

    @classmethod
    def parse(cls, message: dict[str, Any]) -> _Message:
        role, calls = message["role"], message.get("tool_calls")
        text = f"<{role}> {message.get('content') or ''} {json.dumps(calls) if calls else ''}"
        return cls(role == "assistant", text)


def read_sessions(records: Iterable[dict[str, Any]]) -> Iterator[Session]:
    """A session for each conversation in which the assistant says something."""
    for record in records:
        messages = [_Message.parse(message) for message in record["traj"]]
        if any(message.is_reply for message in messages[1:]):
            yield Session(f"task-{record['task_id']}-{record['trial']}", functools.partial(_requests, messages))


def _requests(messages: Sequence[_Message]) -> Iterator[Request]:
    prompt = text_tokens(messages[0].text)
    for message in messages[1:]:
        tokens = text_tokens(message.text)
        if message.is_reply:
            yield Request(prompt, tokens.size, 0.0)
        prompt = np.concatenate([prompt, tokens])
