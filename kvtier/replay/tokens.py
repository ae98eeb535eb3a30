"""Token ids for traces that have none: from hashes of blocks, and from text.

What a trace says is equal gets equal tokens, and what it does not say is equal gets different ones. Ids are 30 bits of
a hash and no words of any vocabulary; the cache only ever compares them. A real model gets them folded into its own.
"""

from __future__ import annotations

import hashlib
import re
from zlib import crc32

import numpy as np
import numpy.typing as npt

VOCAB_SIZE = 1 << 30

Words = npt.NDArray[np.uint64]
Tokens = npt.NDArray[np.uint32]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_PIECE = re.compile(r"\w{1,6}|[^\w\s]")


def mix(words: Words) -> Words:
    """Each word scrambled: the SplitMix64 generator (Steele, Lea and Flood, OOPSLA 2014) at these states."""
    words = words + _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def seed_of(*names: object) -> int:
    """A 64-bit number that stands for these names, the same in every process."""
    text = "\0".join(map(str, names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def block_keys(seed: int, ids: npt.NDArray[np.int64]) -> Words:
    """One key for each block: equal for equal ids under the same seed."""
    return mix(ids.astype(np.uint64) ^ np.uint64(seed))


def block_tokens(keys: Words, block_size: int) -> Tokens:
    """The tokens of blocks, one block behind the other."""
    words = mix(keys[:, None] + np.arange(block_size, dtype=np.uint64) * _GOLDEN)
    return (words & np.uint64(VOCAB_SIZE - 1)).astype(np.uint32).reshape(-1)


def text_tokens(text: str) -> Tokens:
    """A token for each piece of at most six letters or digits, and for each other mark. No tokenizer of any model."""
    pieces = _PIECE.findall(text)
    return np.array([crc32(piece.encode()) % VOCAB_SIZE for piece in pieces], dtype=np.uint32)


def fold(tokens: Tokens, vocab_size: int) -> Tokens:
    """Tokens of a vocabulary of `vocab_size`: equal ones stay equal, and different pages differ all but certainly."""
    return tokens % np.uint32(vocab_size)
