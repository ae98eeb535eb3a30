"""Reads traces: one module a format, each with `read_sessions`; `open_trace` finds out which."""

from kvtier.replay.readers.detect import open_trace

__all__ = ["open_trace"]
