"""Shared memory in which a worker hands the daemon the tokens of a long prompt."""

from __future__ import annotations

import logging

from kvtier.errors import ConfigurationError, InvalidRequestError
from kvtier.tiers.shared_memory import SharedMemory
from kvtier.v1 import cache_pb2 as pb

_log = logging.getLogger(__name__)

_NUM_BYTES = 1 << 20  # 262,144 tokens; what is longer travels in the message


class TokenFile:
    """One session's file. Where the machine has no memory for it, tokens travel in messages alone."""

    def __init__(self, name: str) -> None:
        self._memory: SharedMemory | None = None
        try:
            self._memory = SharedMemory(name, _NUM_BYTES)
        except (ConfigurationError, OSError) as error:
            _log.warning("tokens travel in messages, which takes longer: %s", error)

    @property
    def path(self) -> str:
        return str(self._memory.path) if self._memory else ""

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes if self._memory else 0

    def tokens_of(self, request: pb.AcquireRequest) -> bytes:
        """The tokens of a request, from wherever they are.

        NOTE: called before anything is waited for: the worker may write the next ones when it has its answer.
        Raises `InvalidRequestError` for more bytes than the file has.
        """
        if not request.token_file_bytes:
            return request.tokens
        if self._memory is None or request.tokens or request.token_file_bytes > self.num_bytes:
            raise InvalidRequestError(
                f"the request has {len(request.tokens)} bytes of tokens, and {request.token_file_bytes} more in a "
                f"token file of {self.num_bytes}; send them in one of the two"
            )
        return self._memory.read(request.token_file_bytes)

    def close(self) -> None:
        if self._memory:
            self._memory.close()
