"""Pages for the tests of the Redis tier."""

from __future__ import annotations

import random

from kvtier.pages.envelope import PageName

NAMESPACE = "tenant"
LARGE = 16 << 20  # bytes of a page: more than the buffers of a socket take


def page(seed: int, num_bytes: int = 10_000) -> tuple[PageName, memoryview]:
    """A page of its own for every seed."""
    source = random.Random(seed)
    name = PageName(source.randbytes(32), source.randbytes(32), rank=seed % 4)
    return name, memoryview(source.randbytes(num_bytes))


def memory(num_bytes: int = 10_000) -> memoryview:
    """Where a page is read to."""
    return memoryview(bytearray(num_bytes))
