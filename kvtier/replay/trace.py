"""What every reader of traces gives: sessions of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvtier.replay.tokens import Tokens


class Request(NamedTuple):
    """A prompt that a session sends `think_s` seconds after the reply to the one before.

    `prompt` has at least one token; `output_tokens` is the length of the reply.
    """

    prompt: Tokens
    output_tokens: int
    think_s: float


class Session(NamedTuple):
    """One agent's requests, one after the other. `requests` makes them anew at each call: prompts are long."""

    name: str
    requests: Callable[[], Iterator[Request]]
