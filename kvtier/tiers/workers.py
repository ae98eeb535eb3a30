"""Threads that carry out blocking work for an event loop, and a gate that bounds how much of it is under way."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Job(Generic[T]):
    """A function that a worker thread carries out, as the event loop sees it. For one coroutine that waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop, function: Callable[[], T]) -> None:
        self.function = function
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None
        self._outcome: tuple[T | None, BaseException | None] | None = None

    @property
    def is_done(self) -> bool:
        return self._outcome is not None

    def result(self) -> T:
        """What the function returned; raises what it raised."""
        assert self._outcome is not None, "the job is not done"
        result, error = self._outcome
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # a T when there is no error

    async def wait(self, timeout_s: float) -> None:
        """Returns when the job is done, or after `timeout_s` seconds."""
        if self.is_done:
            return
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(timeout_s, self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()

    def settle(self, result: T | None, error: BaseException | None) -> None:
        """For the worker, on the event loop."""
        self._outcome = (result, error)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Workers:
    """A fixed number of threads that run functions handed over by the event loop.

    The hand-over of a `ThreadPoolExecutor` takes two to three times as long, as much as sending a small page; and these
    threads do not keep a process alive when one of them hangs.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        for index in range(num_threads):
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True).start()

    def submit(self, function: Callable[[], T]) -> Job[T]:
        """Runs `function` in the next free thread."""
        job = Job(self._loop, function)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """Lets the threads end after what was submitted; waits for none."""
        for _ in range(self._num_threads):
            self._jobs.put(None)

    def _run(self) -> None:
        while self._carry_out_next():
            pass

    def _carry_out_next(self) -> bool:
        # A method of its own, so that no thread that waits for work holds on to the memory of the last.
        job = self._jobs.get()
        if job is None:
            return False
        result, error = None, None
        try:
            result = job.function()
        except BaseException as raised:  # handed to whoever waits, not handled here
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(job.settle, result, error)
        return True


class Gate:
    """Lets `max_items` through at a time, together at most `max_bytes` large; the rest wait in their order.

    For one event loop. An item larger than `max_bytes` goes alone.
    """

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self._free_items = max_items
        self._free_bytes = self._max_bytes = max_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, num_bytes: int) -> None:
        """Waits for its turn. Whoever was let in calls `leave` with the same number."""
        num_bytes = min(num_bytes, self._max_bytes)
        if not self._waiting and self._fits(num_bytes):
            self._take(num_bytes)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn came at the same moment
                self.leave(num_bytes)
            self._admit()
            raise

    def leave(self, num_bytes: int) -> None:
        self._free_items += 1
        self._free_bytes += min(num_bytes, self._max_bytes)
        self._admit()

    def _fits(self, num_bytes: int) -> bool:
        return self._free_items > 0 and num_bytes <= self._free_bytes

    def _take(self, num_bytes: int) -> None:
        self._free_items -= 1
        self._free_bytes -= num_bytes

    def _admit(self) -> None:
        while self._waiting:
            num_bytes, turn = self._waiting[0]
            if not turn.done():
                if not self._fits(num_bytes):
                    return
                self._take(num_bytes)
                turn.set_result(None)
            self._waiting.popleft()
