"""One call of the Redis tier as its threads see it: a deadline, and the memory of a page that the caller lends.

A caller must not get its memory back while a thread can still touch it, and must not wait for a thread that hangs where
it touches nothing (a name server, a handshake). So a call can be given up, and says whether that took effect at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class DeadlinePassedError(Exception):
    """The call has no time left, or its caller gave it up. Never leaves the tier."""


class Call:
    """One call, while a thread carries it out. Whatever touches its page happens inside `with call:`.

    Args:
        timeout_s: seconds until the deadline.
        sends: the page that is sent, if it sends one.
        receives: the memory for the page, if it receives one.

    NOTE: once `give_up` has returned True, no thread touches the page any more.
    """

    def __init__(
        self, timeout_s: float, *, sends: memoryview | None = None, receives: memoryview | None = None
    ) -> None:
        self.receives = receives
        self.was_begun = False  # by a thread
        self._has_page = sends is not None or receives is not None
        self._deadline = time.monotonic() + timeout_s
        self._lock = threading.Lock()
        self._given_up = False
        self._touching = False

    def remaining_s(self) -> float:
        """Seconds left, more than none; raises `DeadlinePassedError`."""
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0 or self._given_up:
            raise DeadlinePassedError
        return remaining_s

    def __enter__(self) -> None:
        """Raises `DeadlinePassedError` when the call is over already."""
        with self._lock:
            self.remaining_s()
            self._touching = True

    def __exit__(self, *exception: object) -> None:
        self._touching = False

    def give_up(self) -> bool:
        """Ends the call early. False: a thread may be touching the page; it stops by the deadline."""
        with self._lock:
            self._given_up = True
            return not (self._has_page and self._touching)

    def on_this_thread(self, function: Callable[[Call], T]) -> T:
        """Runs `function`; the connections that it uses serve this call."""
        self.remaining_s()
        self.was_begun = True
        _current.call = self
        try:
            return function(self)
        finally:
            del _current.call


class _Current(threading.local):
    call: Call


_current = _Current()


def current_call() -> Call:
    """The call that this thread carries out."""
    return _current.call
