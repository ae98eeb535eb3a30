"""The tensors of these tests are so small that threads only wait for each other."""

from __future__ import annotations

from single_thread import one_thread

__all__ = ["one_thread"]
