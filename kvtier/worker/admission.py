"""Leases for waiting requests, got in a thread of their own: others decode while pages come up from lower tiers."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from kvtier.client import Lease, Session
from kvtier.errors import DaemonUnavailableError, KvtierError, LeaseLostError, LeaseUnknownError, SessionLostError
from kvtier.worker.sequence import Sequence

LEASE_GONE = (SessionLostError, LeaseUnknownError, DaemonUnavailableError)
"""What says that a lease is of no use any more, or cannot be had from a daemon that is away."""


class Admitted(NamedTuple):
    """A sequence and what the daemon answered for it: a lease, or why there is none."""

    sequence: Sequence
    answer: Lease | KvtierError


class Admission:
    """Asks for one lease at a time: leases are given in the order in which they were asked for."""

    def __init__(self, session: Session, promotion_wait_s: float) -> None:
        self._session = session
        self._promotion_wait_s = promotion_wait_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvtier-admission")
        self._asked: tuple[Sequence, Future[Lease]] | None = None

    def close(self) -> None:
        """Asks for nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def is_idle(self) -> bool:
        """Whether the next lease can be asked for."""
        return self._asked is None

    def ask(self, sequence: Sequence, prefill_tokens_per_second: float) -> None:
        """Begins to get a lease on the cached prefix of a sequence, with pages for the rest of its tokens and one more.

        NOTE: the sequence does not change until its answer was taken.
        """
        assert self._asked is None
        self._asked = sequence, self._thread.submit(self._get_lease, sequence, prefill_tokens_per_second)

    def answer(self, timeout_s: float | None) -> Admitted | None:
        """The answer for the sequence asked for, when there is one within `timeout_s` (None: however long it takes)."""
        assert self._asked is not None
        sequence, future = self._asked
        try:
            error = future.exception(timeout_s)
        except TimeoutError:
            return None
        self._asked = None
        if error is None:
            return Admitted(sequence, future.result())
        if isinstance(error, KvtierError):
            return Admitted(sequence, error)
        raise error

    def withdraw(self, sequence: Sequence) -> None:
        """Has the lease of a sequence given back as soon as it comes, if it is the one that was asked for."""
        if self._asked and self._asked[0] is sequence:
            self._asked[1].add_done_callback(_give_back)
            self._asked = None

    def _get_lease(self, sequence: Sequence, prefill_tokens_per_second: float) -> Lease:
        lease = self._session.acquire(
            sequence.request.namespace,
            np.array(sequence.tokens, dtype="<u4"),
            extra_keys=sequence.request.extra_keys,
            wait_s=self._promotion_wait_s,
            prefill_tokens_per_second=prefill_tokens_per_second,
        )
        num_missing = sequence.num_pages_to_start - len(lease.matched_pages)
        try:
            if num_missing > 0:
                lease.extend(num_missing)
        except KvtierError:
            release(lease)
            raise
        return lease


def _give_back(got: Future[Lease]) -> None:
    if not got.cancelled() and got.exception() is None:
        got.result().release_soon()


def release(lease: Lease) -> None:
    """Gives a lease back; one that is gone needs no release.

    When its time is over, the daemon has been silent for as long. Nobody waits then: it has it back when it wakes up.
    Nor does the daemon keep it when this is interrupted.
    """
    try:
        lease.check()
        lease.release()
    except LeaseLostError:
        lease.release_soon()
    except LEASE_GONE:
        pass
    except BaseException:
        lease.release_soon()  # the daemon may not have been asked; to ask it twice does no harm
        raise
