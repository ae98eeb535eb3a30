"""Mooncake's traces: one request a line, with global ids of its blocks of 512 tokens.

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, ...]}

The lines do not say which requests are of one conversation, so each is a session of its own, in the order of the file:
at concurrency 1 the cache sees the prompts as they were recorded. The times of arrival are not used.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.replay.tokens import block_keys, block_tokens, seed_of
from kvtier.replay.trace import Request, Session

_BLOCK_SIZE = 512
_SEED = seed_of("mooncake")


def read_sessions(records: Iterable[dict[str, Any]]) -> Iterator[Session]:
    """A session of one request for each record."""
    for number, record in enumerate(records):
        ids = np.array(record["hash_ids"], dtype=np.int64)
        num_tokens, num_output = int(record["input_length"]), int(record["output_length"])
        if not 0 < num_tokens <= ids.size * _BLOCK_SIZE:
            raise ValueError(f"request {number} has {num_tokens} tokens in {ids.size} blocks of {_BLOCK_SIZE}")
        yield Session(f"request-{number}", functools.partial(_requests, ids, num_tokens, num_output))


def _requests(ids: npt.NDArray[np.int64], num_tokens: int, num_output: int) -> Iterator[Request]:
    yield Request(block_tokens(block_keys(_SEED, ids), _BLOCK_SIZE)[:num_tokens], num_output, 0.0)
