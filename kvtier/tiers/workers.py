"""Threads that carry out blocking work for an event loop, and a gate that bounds how much of it is under way."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")


class Workers:
    """A fixed number of threads that run functions handed over by the event loop.

    The hand-over of a `ThreadPoolExecutor` takes two to three times as long, as much as sending a small page; and these
    threads do not keep a process alive when one of them hangs.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        for index in range(num_threads):
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True).start()

    def submit(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Runs `function` in the next free thread. What it raises is dropped when nobody waits for it."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._work.put((future, function))
        return future

    def close(self) -> None:
        """Lets the threads end after what was submitted; waits for none."""
        for _ in range(self._num_threads):
            self._work.put(None)

    def _run(self) -> None:
        while self._carry_out_next():
            pass

    def _carry_out_next(self) -> bool:
        # A method of its own, so that no thread that waits for work holds on to the memory of the last.
        item = self._work.get()
        if item is None:
            return False
        future, function = item
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:  # handed to whoever waits, not handled here
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(_settle, future, result, error)
        return True


def _settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
        future.exception()  # marks it as seen: the caller may have given up


class Gate:
    """Lets `max_items` through at a time, together at most `max_bytes` large; the rest wait in their order.

    For one event loop. An item larger than `max_bytes` goes alone.
    """

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self._free_items = max_items
        self._free_bytes = self._max_bytes = max_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def passing(self, num_bytes: int) -> AsyncIterator[None]:
        num_bytes = min(num_bytes, self._max_bytes)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        self._admit()
        try:
            await turn
            yield
        finally:
            if not turn.cancelled():  # cancelled: it left the queue, not the gate
                self._free_items += 1
                self._free_bytes += num_bytes
            self._admit()

    def _admit(self) -> None:
        while self._waiting:
            num_bytes, turn = self._waiting[0]
            if not turn.cancelled():
                if not self._free_items or num_bytes > self._free_bytes:
                    return
                self._free_items -= 1
                self._free_bytes -= num_bytes
                turn.set_result(None)
            self._waiting.popleft()
