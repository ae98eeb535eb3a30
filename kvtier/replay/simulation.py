"""The modelled half: sessions that think, wait for their turn and are served, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvtier.client import TokensByTier
from kvtier.errors import CacheFullError
from kvtier.replay.clock import Delay, Process, Signal, Station, VirtualClock
from kvtier.replay.options import Rates, Workload
from kvtier.replay.trace import Session
from kvtier.replay.worker import Grant, ReplayWorker


class Served(NamedTuple):
    """A request that got its first token, `first_token_s` after it arrived.

    `left_tokens` were known below the device and did not come up, for want of pages to bring them to. `findable_tokens`
    is what a cache without end would have found.
    """

    prompt_tokens: int
    output_tokens: int
    found: TokensByTier
    left_tokens: int
    findable_tokens: int
    first_token_s: float


class Outcome(NamedTuple):
    """What happened until `end_s` of virtual time. The GPU computed prompts for `prefill_s` of it."""

    served: list[Served]
    num_refused: int
    num_sessions: int
    end_s: float
    prefill_s: float


class Simulation:
    """One replay at one concurrency.

    Each place has one session at a time. A request waits for the link, over which the pages of one request come up at a
    time, then for the GPU, which computes one prompt at a time. The link is free for the next request once the GPU has
    taken this one. Replies are decoded beside each other and beside all that.
    """

    def __init__(self, worker: ReplayWorker, workload: Workload, rates: Rates, token_bytes: int) -> None:
        self._worker = worker
        self._workload = workload
        self._rates = rates
        self._token_bytes = token_bytes
        self._clock = VirtualClock()
        self._link = Station(self._clock)
        self._gpu = Station(self._clock)
        self._released = Signal(self._clock)
        self._served: list[Served] = []
        self._num_refused = 0
        self._num_sessions = 0
        self._prefill_s = 0.0

    async def run(self, sessions: Sequence[Session], concurrency: int, advance: Callable[[], None]) -> Outcome:
        """Replays until a place is free that no session is left for; calls `advance` when a session has ended."""
        waiting = iter(sessions)
        for place in range(concurrency):
            self._clock.start(self._place(place * self._workload.start_interval_s, waiting, advance))
        await self._clock.run()
        return Outcome(self._served, self._num_refused, self._num_sessions, self._clock.now_s, self._prefill_s)

    async def _place(self, start_s: float, waiting: Iterator[Session], advance: Callable[[], None]) -> Process:
        yield Delay(start_s)
        for session in waiting:
            self._num_sessions += 1
            for request in session.requests():
                yield Delay(request.think_s * self._workload.think_time_scale)
                arrived_s = self._clock.now_s
                yield self._link
                try:
                    while (grant := await self._worker.lease(request)) is None:
                        yield self._released
                except CacheFullError:
                    self._num_refused += 1
                    self._link.leave()
                    continue
                yield Delay(self._rates.transfer_s(grant.lease.matched_tokens, self._token_bytes))
                yield self._gpu
                self._link.leave()
                yield Delay(self._compute(grant))
                self._gpu.leave()
                await self._first_token(grant, arrived_s)
                yield Delay(self._rates.decode_s(request.output_tokens))
                await self._worker.release(grant)
                self._released.fire()
            advance()
        self._clock.stop()

    def _compute(self, grant: Grant) -> float:
        """Seconds that the GPU takes for what was not found."""
        seconds = self._rates.prefill_s(grant.lease.matched_tokens.total, grant.request.prompt.size)
        self._prefill_s += seconds
        return seconds

    async def _first_token(self, grant: Grant, arrived_s: float) -> None:
        await self._worker.commit(grant)
        self._served.append(
            Served(
                grant.request.prompt.size,
                grant.request.output_tokens,
                grant.lease.matched_tokens,
                grant.lease.left_tokens.total,
                grant.findable_tokens,
                self._clock.now_s - arrived_s,
            )
        )
