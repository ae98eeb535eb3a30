"""Background loops that are started again when they die, counted, and seen in health."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvtier.metrics import Metrics

_log = logging.getLogger(__name__)

_RESTART_AFTER_S = 1.0


class Supervisor:
    """Runs loops until `stop`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.failing: set[str] = set()  # loops that died and wait to be started again

    def start(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        """Runs `loop`, which never returns by itself, under a name for log and metrics."""
        self._tasks[name] = asyncio.create_task(self._keep_running(name, loop), name=name)

    async def _keep_running(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await loop()
            except Exception:  # a process's edge: whatever the loop did, the daemon goes on
                _log.exception("background loop %s died; starting it again", name)
            self._metrics.loop_restarts.labels(name).inc()
            self.failing.add(name)
            await asyncio.sleep(_RESTART_AFTER_S)
            self.failing.discard(name)

    async def stop(self, name: str | None = None) -> None:
        """Ends one loop, or all of them."""
        names = [name] if name is not None else list(self._tasks)
        tasks = [self._tasks.pop(each) for each in names if each in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
