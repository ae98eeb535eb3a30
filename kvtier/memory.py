"""Keeps the allocator from giving memory back to the system and taking it again with every request."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEEP_BYTES = 64 << 20


def keep_freed_memory() -> None:
    """Lets glibc keep up to 64 MiB of freed memory for the next request.

    The tokens of a long prompt are half a megabyte, in several buffers. By default glibc maps and unmaps such buffers
    anew each time, and the page faults take longer than the lookup. The `kvtier` command calls this for its own
    processes; a worker with long prompts does well to call it too. Does nothing where the C library is another.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
    mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES // 2)
