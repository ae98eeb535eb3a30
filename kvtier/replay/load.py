"""The load of one replay: a trace's sessions, handed out to as many places as are open at a time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvtier.replay.endless import EndlessCache
from kvtier.replay.options import Workload
from kvtier.replay.tokens import VOCAB_SIZE, seed_of
from kvtier.replay.trace import Request, Session


class Visit(NamedTuple):
    """A session that begins: its requests, and what a cache without end knows of those that it shares tokens with."""

    requests: Iterator[Request]
    endless: EndlessCache


class Load:
    """Sessions in their order: each once, or all of them again and again until the workload's time is up.

    Every round after the first has tokens of its own: what it asks for was never seen before, in any tier.

    Args:
        sessions: of the trace.
        workload: how they are replayed. Its time begins with the first session.
        concurrency: number of places.
        page_size: tokens of a page.
        advance: called when a session has ended.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        workload: Workload,
        concurrency: int,
        page_size: int,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        self.start_delays_s = [place * workload.start_interval_s for place in range(concurrency)]
        self.num_begun = 0
        self._sessions = sessions
        self._workload = workload
        self._page_size = page_size
        self._advance = advance
        self._ends_s: float | None = None
        self._visits = self._hand_out()

    @property
    def is_time_up(self) -> bool:
        """Whether nothing is to be asked any more; never where each session is replayed once."""
        return self._ends_s is not None and time.monotonic() >= self._ends_s

    def __iter__(self) -> Iterator[Visit]:
        """The sessions that are left; all places take theirs from the same."""
        return self._visits

    def _hand_out(self) -> Iterator[Visit]:
        rounds: Iterable[int] = range(1)
        if self._workload.duration_s is not None:
            self._ends_s = time.monotonic() + self._workload.duration_s
            rounds = itertools.count()
        for number in rounds:
            endless = EndlessCache(self._page_size)
            for session in self._sessions:
                if self.is_time_up:
                    return
                self.num_begun += 1
                yield Visit(self._requests(session, number), endless)

    def _requests(self, session: Session, number: int) -> Iterator[Request]:
        """The requests of a session in a round, as the workload wants them."""
        other_tokens = np.uint32(seed_of("round", number) % VOCAB_SIZE if number else 0)
        step = self._workload.keep_every
        for request in session.requests():
            if self.is_time_up:
                return
            yield Request(
                request.prompt[::step] ^ other_tokens,
                -(-request.output_tokens // step),
                request.think_s * self._workload.think_time_scale,
            )
        self._advance()
