"""Fixtures of the tests of the calibration."""

from __future__ import annotations

from single_thread import one_thread

__all__ = ["one_thread"]
