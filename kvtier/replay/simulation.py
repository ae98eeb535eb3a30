"""The modelled half: sessions that think, wait for their turn and are served, in virtual time."""

from __future__ import annotations

from kvtier.errors import CacheFullError
from kvtier.replay.clock import Delay, Process, Signal, Station, VirtualClock
from kvtier.replay.load import Load
from kvtier.replay.options import Rates
from kvtier.replay.tally import Served, Tally
from kvtier.replay.worker import Grant, ReplayWorker


class Simulation:
    """One replay at one concurrency.

    Each place has one session at a time. A request waits for the link, over which the pages of one request come up at a
    time, then for the GPU, which computes one prompt at a time. The link is free for the next request once the GPU has
    taken this one. Replies are decoded beside each other and beside all that.
    """

    def __init__(self, worker: ReplayWorker, load: Load, rates: Rates, token_bytes: int, tally: Tally) -> None:
        self._worker = worker
        self._load = load
        self._rates = rates
        self._token_bytes = token_bytes
        self._tally = tally
        self._clock = VirtualClock()
        self._link = Station(self._clock)
        self._gpu = Station(self._clock)
        self._released = Signal(self._clock)
        self._prefill_s = 0.0

    async def run(self) -> None:
        """Replays until a place is free that no session is left for."""
        for delay_s in self._load.start_delays_s:
            self._clock.start(self._place(delay_s))
        await self._clock.run()
        self._tally.duration_s, self._tally.prefill_s = self._clock.now_s, self._prefill_s

    async def _place(self, start_s: float) -> Process:
        yield Delay(start_s)
        for visit in self._load:
            for request in visit.requests:
                yield Delay(request.think_s)
                arrived_s = self._clock.now_s
                yield self._link
                try:
                    while (grant := await self._worker.lease(request, visit.endless)) is None:
                        yield self._released
                except CacheFullError:
                    self._tally.num_refused += 1
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
        self._clock.stop()

    def _compute(self, grant: Grant) -> float:
        """Seconds that the GPU takes for what was not found."""
        seconds = self._rates.prefill_s(grant.lease.matched_tokens.total, grant.request.prompt.size)
        self._prefill_s += seconds
        return seconds

    async def _first_token(self, grant: Grant, arrived_s: float) -> None:
        await self._worker.commit(grant)
        self._tally.add(
            Served(
                grant.request.prompt.size,
                grant.request.output_tokens,
                grant.lease.matched_tokens,
                grant.lease.left_tokens.total,
                grant.findable_tokens,
                self._clock.now_s - arrived_s,
            )
        )
