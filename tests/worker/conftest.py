"""Fixtures of the tests of the worker."""

from serving import directory
from single_thread import one_thread
from worker_fixtures import daemon, start_worker

__all__ = ["daemon", "directory", "one_thread", "start_worker"]
