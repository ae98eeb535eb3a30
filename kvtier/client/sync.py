"""The blocking client of a worker: the asyncio client on an event loop in a thread, one for all sessions."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar

from kvtier.client.aio import AsyncLease, AsyncSession, ExtraKeys
from kvtier.client.channel import TlsFiles
from kvtier.client.convert import PageNumbers, Tokens
from kvtier.client.pool import PoolMapping
from kvtier.errors import SessionLostError
from kvtier.pages.fingerprint import CacheIdentity
from kvtier.results import CommitResult, TokensByTier

T = TypeVar("T")


class _LoopThread:
    """An event loop in a daemon thread. Every coroutine run on it has its own deadline."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvtier-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; raises `SessionLostError` where nothing can run it."""
        if self._is_gone or threading.current_thread() is self._thread:
            work.close()
            raise SessionLostError(
                "the session belongs to another process, to one that ends, or is used on its own thread; connect anew"
            )
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()  # so that what comes late is given back
            raise

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` without waiting for it, if anything can; what it raises is nobody's."""
        if self._is_gone:
            work.close()
        else:
            asyncio.run_coroutine_threadsafe(work, self._loop)

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` that gives something back, and waits for it where that is possible.

        NOTE: Garbage is collected on the loop's own thread too, and at the end of a process when no thread runs any
        more: a session or a lease that is given back there must not wait.
        """
        if self._is_gone or threading.current_thread() is self._thread:
            self.start(work)
        else:
            self.run(work)

    @property
    def _is_gone(self) -> bool:
        return sys.is_finalizing() or os.getpid() != self._process


_start_loop = functools.cache(_LoopThread)
_start_turn = threading.Lock()


def _loop_thread() -> _LoopThread:
    """The one of this process.

    NOTE: gRPC wakes all event loops of a process for every event. With a loop for each session all of them would wake,
    and what comes late for one that has been closed would raise in another.
    """
    with _start_turn:
        return _start_loop()


def _after_fork() -> None:
    """In the child, which has no threads of its parent's."""
    _start_loop.cache_clear()
    _start_turn.release()


os.register_at_fork(before=_start_turn.acquire, after_in_parent=_start_turn.release, after_in_child=_after_fork)


def connect(
    address: str,
    identity: CacheIdentity,
    *,
    device_uuids: Sequence[str] = (),
    timeout_s: float = 10.0,
    tls: TlsFiles | None = None,
) -> Session:
    """Attaches to a daemon; see `AsyncSession.connect`."""
    loop = _loop_thread()
    attaching = AsyncSession.connect(address, identity, device_uuids=device_uuids, timeout_s=timeout_s, tls=tls)
    return Session(loop, loop.run(attaching))


class Session:
    """A worker's session; see `AsyncSession`. Usable from several threads."""

    def __init__(self, loop: _LoopThread, session: AsyncSession) -> None:
        self._loop = loop
        self._session = session

    @property
    def identity(self) -> CacheIdentity:
        return self._session.identity

    @property
    def pool(self) -> PoolMapping:
        """The device pool as of the last attach; read it anew after a `SessionLostError`."""
        return self._session.pool

    @property
    def epoch(self) -> str:
        """Of the daemon that this session attached to last."""
        return self._session.epoch

    def acquire(
        self,
        namespace: str,
        tokens: Tokens,
        *,
        parent: Lease | None = None,
        extra_keys: ExtraKeys = (),
        reserve_pages: int = 0,
        wait_s: float = 0.0,
        prefill_tokens_per_second: float = 0.0,
    ) -> Lease:
        """A lease on the cached prefix of `tokens`; see `AsyncSession.acquire`."""
        lease = self._loop.run(
            self._session.acquire(
                namespace,
                tokens,
                parent=parent.inner if parent else None,
                extra_keys=extra_keys,
                reserve_pages=reserve_pages,
                wait_s=wait_s,
                prefill_tokens_per_second=prefill_tokens_per_second,
            )
        )
        return Lease(self._loop, lease)

    def close(self) -> None:
        """Ends the session and its leases."""
        self._loop.finish(self._session.close())

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Lease:
    """A claim on pages; see `AsyncLease`."""

    def __init__(self, loop: _LoopThread, lease: AsyncLease) -> None:
        self._loop = loop
        self.inner = lease

    @property
    def lease_id(self) -> int:
        return self.inner.lease_id

    @property
    def matched_pages(self) -> PageNumbers:
        """The prefix, one page number for each whole page that was found."""
        return self.inner.matched_pages

    @property
    def reserved_pages(self) -> PageNumbers:
        """Pages to write, without those committed since."""
        return self.inner.reserved_pages

    @property
    def matched_tokens(self) -> TokensByTier:
        """Where the prefix was found."""
        return self.inner.matched_tokens

    @property
    def left_tokens(self) -> TokensByTier:
        """What was known below the device but did not come up in time."""
        return self.inner.left_tokens

    @property
    def valid_until_s(self) -> float:
        """When its time is over; see `AsyncLease`."""
        return self.inner.valid_until_s

    def check(self) -> None:
        """Raises `LeaseLostError` when the pages may be another's by now."""
        self.inner.check()

    def extend(self, num_pages: int) -> PageNumbers:
        """Reserves more pages and returns them."""
        return self._loop.run(self.inner.extend(num_pages))

    def commit(self, tokens: Tokens, pages: PageNumbers, extra_keys: ExtraKeys = ()) -> CommitResult:
        """Publishes reserved pages; see `AsyncLease.commit`."""
        return self._loop.run(self.inner.commit(tokens, pages, extra_keys))

    def release(self) -> None:
        """Gives all pages back."""
        self._loop.finish(self.inner.release())

    def release_soon(self) -> None:
        """Has all pages given back without waiting for it: a daemon that does not answer is no error."""
        self._loop.start(self.inner.release())
