"""Virtual time: processes that wait for each other and for a clock that jumps from event to event.

A process is an async generator that yields what it waits for: a `Delay`, its turn at a `Station`, a `Signal`. Between
two yields it may await real calls; virtual time stands still meanwhile and no other process runs, so what happens, and
in which order, does not depend on how fast this machine is.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import AsyncGenerator
from typing import NamedTuple, Protocol


class Wait(Protocol):
    """What a process can yield."""

    def begin(self, clock: VirtualClock, process: Process) -> None:
        """Lets `clock` resume the process when the wait is over."""


Process = AsyncGenerator[Wait, None]


class VirtualClock:
    """Runs processes. Those that are due at the same time run in the order in which they began to wait."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Process]] = []
        self._order = itertools.count()
        self._processes: list[Process] = []
        self._stopped = False

    def start(self, process: Process) -> None:
        """Lets a process begin now."""
        self._processes.append(process)
        self.resume_in(0.0, process)

    def resume_in(self, seconds: float, process: Process) -> None:
        """Lets a process go on after some virtual time."""
        heapq.heappush(self._due, (self.now_s + seconds, next(self._order), process))

    def stop(self) -> None:
        """Ends `run` when the process that runs now waits next."""
        self._stopped = True

    async def run(self) -> None:
        """Runs until nothing is due any more, or `stop`. Processes that wait then are closed where they are."""
        try:
            while self._due and not self._stopped:
                self.now_s, _, process = heapq.heappop(self._due)
                wait = await anext(process, None)
                if wait is not None:
                    wait.begin(self, process)
        finally:
            for process in self._processes:
                await process.aclose()


class Delay(NamedTuple):
    """Waits for so many seconds."""

    seconds: float

    def begin(self, clock: VirtualClock, process: Process) -> None:
        clock.resume_in(self.seconds, process)


class Station:
    """Serves one process at a time, first come first served. Yield it to enter; call `leave` afterwards."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._is_taken = False
        self._queue: deque[Process] = deque()

    def begin(self, clock: VirtualClock, process: Process) -> None:
        if self._is_taken:
            self._queue.append(process)
        else:
            self._is_taken = True
            clock.resume_in(0.0, process)

    def leave(self) -> None:
        """Lets the next one in."""
        if self._queue:
            self._clock.resume_in(0.0, self._queue.popleft())
        else:
            self._is_taken = False


class Signal:
    """Yield it to wait until somebody calls `fire`."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._waiting: list[Process] = []

    def begin(self, clock: VirtualClock, process: Process) -> None:
        self._waiting.append(process)

    def fire(self) -> None:
        """Lets all that wait go on."""
        for process in self._waiting:
            self._clock.resume_in(0.0, process)
        self._waiting.clear()
