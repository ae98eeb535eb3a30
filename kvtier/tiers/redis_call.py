"""One call of the Redis tier as its threads see it: a deadline, and the memory of a page that the caller lends.

A caller must not get its memory back while a thread can still touch it, and must not wait for a thread that hangs where
it touches nothing (a name server, a handshake). So a call can be given up, and says whether that took effect at once.

Giving up shuts the connection down and leaves closing it to the call's thread: were it closed under that thread, the
next socket to be opened could get its number, and the thread would wait on that one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from socket import SHUT_RDWR, socket
from typing import TypeVar

T = TypeVar("T")


class DeadlinePassedError(Exception):
    """The call has no time left, or its caller gave it up. Never leaves the tier."""


class Call:
    """One call, while a thread carries it out.

    Whatever touches its page happens inside `with call:`, or `with call.using(sock):` when it waits for a server.

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
        self._socket: socket | None = None  # what `give_up` shuts down

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
        with self._lock:
            self._touching = False
            self._socket = None

    def using(self, sock: socket) -> Call:
        """For `with`: inside, `give_up` shuts `sock` down."""
        self._socket = sock
        return self

    def let_go(self) -> None:
        """For whoever is about to close the socket inside `with`."""
        with self._lock:
            self._socket = None

    def give_up(self) -> bool:
        """Ends the call early. False: a thread may still be touching the page; it is about to stop."""
        with self._lock:
            self._given_up = True
            if self._touching and self._socket is not None:
                with suppress(OSError):  # the server was first
                    socket.shutdown(self._socket, SHUT_RDWR)  # over TLS too: the thread is inside of its TLS object
            return not (self._has_page and self._touching)

    def on_this_thread(self, function: Callable[[Call], T]) -> T:
        """Runs `function`; the connections that it uses serve this call."""
        self.remaining_s()
        self.was_begun = True
        _current.call = self
        try:
            return function(self)
        finally:
            _current.call = None


class _Current(threading.local):
    call: Call | None = None


_current = _Current()


def current_call() -> Call:
    """The call that this thread carries out."""
    assert _current.call is not None, "this thread carries out no call"
    return _current.call


def let_go_of_socket() -> None:
    """Before a socket is closed, in whatever thread."""
    if _current.call is not None:
        _current.call.let_go()
