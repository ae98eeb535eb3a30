"""A circuit breaker: stops asking a server that does not answer, and finds out by single attempts when it is back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import StrEnum

from kvtier.errors import RedisUnavailableError

_log = logging.getLogger(__name__)


class BreakerState(StrEnum):
    """Closed lets every attempt through, open none, half open a single one."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Attempt:
    """One attempt that the breaker let through; a context around it. Without a verdict it counts as nothing."""

    def __init__(self, breaker: Breaker, epoch: int) -> None:
        self._breaker = breaker
        self._epoch = epoch

    def succeeded(self) -> None:
        """The server answered, be it with a refusal."""
        self._breaker._record_success(self._epoch)

    def failed(self, error: str) -> None:
        """The server did not answer; `error` says what was seen, without credentials."""
        self._breaker._record_failure(self._epoch, error)

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *exception: object) -> None:
        self._breaker._end(self._epoch)


class Breaker:
    """Opens after `failures_to_open` failures in a row and lets one attempt through every `cool_down_s` seconds.

    For one thread, the event loop's. `last_error` says what was seen when an attempt last failed, and stays after that.

    Args:
        server: its address without credentials, for messages.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        server: str,
        *,
        failures_to_open: int = 3,
        cool_down_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.last_error = ""
        self._server = server
        self._failures_to_open = failures_to_open
        self._cool_down_s = cool_down_s
        self._clock = clock
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._opened_at = 0.0
        # NOTE: grows whenever the state changes; a verdict counts only in the epoch in which its attempt began.
        self._epoch = 0

    @property
    def state(self) -> BreakerState:
        return self._state

    def check(self) -> None:
        """Raises `RedisUnavailableError` when an attempt would be refused now."""
        cools_down = self._state is BreakerState.OPEN and self._clock() < self._opened_at + self._cool_down_s
        if cools_down or self._state is BreakerState.HALF_OPEN:
            raise RedisUnavailableError(f"{self._server} is not asked for the moment: {self.last_error}")

    def attempt(self) -> Attempt:
        """Lets one attempt through, or raises `RedisUnavailableError`."""
        self.check()
        if self._state is BreakerState.OPEN:
            self._change(BreakerState.HALF_OPEN)
        return Attempt(self, self._epoch)

    def _record_success(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        self._failures = 0
        if self._state is BreakerState.HALF_OPEN:
            self._change(BreakerState.CLOSED)
            _log.info("%s answers again", self._server)

    def _record_failure(self, epoch: int, error: str) -> None:
        if epoch != self._epoch:
            return
        self.last_error = error
        self._failures += 1
        if self._failures < self._failures_to_open:
            return
        if self._state is BreakerState.CLOSED:
            _log.warning("%s failed %d times in a row and is left alone: %s", self._server, self._failures, error)
        self._opened_at = self._clock()
        self._change(BreakerState.OPEN)

    def _end(self, epoch: int) -> None:
        if self._state is BreakerState.HALF_OPEN and epoch == self._epoch:
            self._change(BreakerState.OPEN)  # no verdict: the next caller may try at once

    def _change(self, state: BreakerState) -> None:
        self._state = state
        self._epoch += 1
