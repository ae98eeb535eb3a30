"""Fixtures of tests with a daemon."""

from serving import directory

__all__ = ["directory"]
