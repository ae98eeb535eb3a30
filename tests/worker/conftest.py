"""Fixtures of the tests of the worker."""

from serving import directory
from worker_fixtures import daemon, one_thread, start_worker

__all__ = ["daemon", "directory", "one_thread", "start_worker"]
