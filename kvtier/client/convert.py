"""Between what callers give and get and what travels: tokens, page numbers, figures."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.errors import InvalidRequestError
from kvtier.results import TokensByTier
from kvtier.v1 import cache_pb2 as pb

Tokens = bytes | npt.NDArray[np.integer]
"""Token ids: an integer array, or little-endian uint32 bytes."""

MAX_TOKEN_BYTES = 15 << 20
"""What a message of the default limit (16 MiB) carries beside its other fields."""

PageNumbers = npt.NDArray[np.uint32]


def tokens_by_tier(message: pb.TokensByTier) -> TokensByTier:
    """Tokens by tier as they arrive."""
    return TokensByTier(message.device, message.host, message.redis)


def token_bytes(tokens: Tokens) -> bytes:
    """Tokens as they travel; raises `InvalidRequestError` for ids that are no uint32, or too many for a message."""
    num_bytes = len(tokens) if isinstance(tokens, bytes) else 4 * tokens.size
    if num_bytes > MAX_TOKEN_BYTES:
        raise InvalidRequestError(
            f"{num_bytes:,} bytes of tokens do not fit into one message; send at most {MAX_TOKEN_BYTES:,}"
        )
    if isinstance(tokens, bytes):
        return tokens
    array = np.asarray(tokens)
    if array.dtype.kind not in "iu" or (array.size and (array.min() < 0 or array.max() >= 2**32)):
        raise InvalidRequestError(f"tokens are {array.dtype} values; give integer ids from 0 to 2^32 - 1")
    return array.astype("<u4", copy=False).tobytes()


def page_numbers(data: bytes) -> PageNumbers:
    """Page numbers as they arrive."""
    return np.frombuffer(data, dtype="<u4").astype(np.uint32)
