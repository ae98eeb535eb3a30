"""The tokens of a long prompt on their way to a daemon on the same machine: in shared memory instead of the message."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

_SMALLEST_BYTES = 32 << 10  # less is as quick in the message


class TokenFile:
    """The file that the daemon made for this session; where it cannot be opened, tokens travel in messages.

    A message of half a megabyte is copied many times on its way, and sockets take a part of it at a time.
    """

    def __init__(self, path: str, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._descriptor: int | None = None
        self._is_lent = False
        if path:
            with contextlib.suppress(OSError):  # a daemon on another machine, or with another /dev/shm
                self._descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)

    @contextlib.contextmanager
    def holding(self, tokens: bytes) -> Iterator[dict[str, Any]]:
        """The fields of an Acquire that say where `tokens` are, until it has been answered.

        NOTE: when the caller stops waiting before that, the daemon may find the tokens of the next request instead;
        nobody wants its answer any more.
        """
        if self._is_lent or not _SMALLEST_BYTES <= len(tokens) <= self._num_bytes or not self._has_written(tokens):
            yield {"tokens": tokens}
            return
        self._is_lent = True
        try:
            yield {"token_file_bytes": len(tokens)}
        finally:
            self._is_lent = False

    def _has_written(self, tokens: bytes) -> bool:
        with contextlib.suppress(OSError):
            return self._descriptor is not None and os.pwrite(self._descriptor, tokens, 0) == len(tokens)
        return False

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
