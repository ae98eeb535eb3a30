"""Carries out calls to Redis: in threads, each within its deadline, none while the breaker is open."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, TypeVar

from redis.cluster import RedisCluster
from redis.exceptions import (
    AskError,
    AuthenticationError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from kvtier.errors import KvtierError, RedisFullError, RedisUnavailableError
from kvtier.tiers.breaker import Attempt, Breaker
from kvtier.tiers.redis_call import Call, DeadlinePassedError
from kvtier.tiers.redis_url import RedisClient, RedisTarget, disconnect
from kvtier.tiers.workers import Gate, Job, Workers

T = TypeVar("T")

_CONTROL_THREADS = 2
_ADVICE: dict[type[Exception], str] = {
    OutOfMemoryError: "raise its maxmemory or let it evict (maxmemory-policy allkeys-lru)",
    AuthenticationError: "check user and password in its URL",
    NoPermissionError: "grant its user the commands and keys that the documentation lists",
    ReadOnlyError: "it is a replica: name the master, or its sentinels",
    MovedError: "it is a node of a Redis Cluster: write redis+cluster:// in its URL",
    AskError: "it is a node of a Redis Cluster: write redis+cluster:// in its URL",
}


class _Lane(NamedTuple):
    """Calls with pages and calls without each have their own, so that lookups do not queue behind transfers."""

    workers: Workers
    gate: Gate


class RedisCaller:
    """The way to one Redis. For the event loop that made it.

    Args:
        timeout_s: how long a call may take once it is under way.
        num_connections: calls with a page under way at a time.
        max_in_flight_bytes: bytes of their pages.
    """

    def __init__(
        self, target: RedisTarget, *, timeout_s: float, num_connections: int, max_in_flight_bytes: int
    ) -> None:
        self.breaker = Breaker(target.address)
        self._target = target
        self._timeout_s = timeout_s
        # Twice as many pages as threads, so that a thread which is done finds the next one waiting.
        self._pages = _Lane(Workers(num_connections, "kvtier-redis"), Gate(2 * num_connections, max_in_flight_bytes))
        self._control = _Lane(Workers(_CONTROL_THREADS, "kvtier-redis-control"), Gate(_CONTROL_THREADS, 0))
        self._client: RedisClient | None = None
        self._client_lock = threading.Lock()
        self._under_way: set[Call] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_closed = False

    @staticmethod
    def max_connections(num_connections: int) -> int:
        """Connections that the client of `target` may need at once."""
        return num_connections + _CONTROL_THREADS

    async def call(
        self,
        work: Callable[[RedisClient, Call], T],
        *,
        sends: memoryview | None = None,
        receives: memoryview | None = None,
    ) -> T:
        """Runs `work` in a thread; it sends or receives this page, or none.

        When this returns or raises, be it for a cancellation, no thread touches the page any more.

        Raises:
            RedisUnavailableError: no answer in time, no connection, a refusal, or the breaker is open.
            RedisFullError: Redis has no memory left.
        """
        self.breaker.check()
        page = receives if sends is None else sends
        lane, num_bytes = (self._control, 0) if page is None else (self._pages, len(page))
        await lane.gate.enter(num_bytes)
        try:
            if self._is_closed:
                raise self._closed_error()
            with self.breaker.attempt() as attempt:
                call = Call(self._timeout_s, sends=sends, receives=receives)
                try:
                    result = await self._carry_out(lane.workers, call, work)
                except Exception as error:  # the edge to a client library: a name that is none, say, is a ValueError
                    failure = self._judge(error, call, attempt)
                else:
                    attempt.succeeded()
                    return result
        finally:
            lane.gate.leave(num_bytes)
        raise failure

    async def close(self) -> None:
        """Breaks off what is under way and closes the connections; takes no longer than a call."""
        self._is_closed = True
        for call in self._under_way:
            call.give_up()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._idle.wait()
        client, self._client = self._client, None
        if client is not None:
            disconnect(client)
        self._pages.workers.close()
        self._control.workers.close()

    async def _carry_out(self, workers: Workers, call: Call, work: Callable[[RedisClient, Call], T]) -> T:
        self._under_way.add(call)
        self._idle.clear()
        job = workers.submit(functools.partial(call.on_this_thread, functools.partial(self._with_client, work)))
        try:
            await _until_let_go(job, call, self._timeout_s)
        finally:
            self._under_way.remove(call)
            if not self._under_way:
                self._idle.set()
        if not job.is_done:
            raise DeadlinePassedError
        return job.result()

    def _with_client(self, work: Callable[[RedisClient, Call], T], call: Call) -> T:
        with self._client_lock:
            call.remaining_s()  # the lock may have taken all of it: a cluster that is down is slow to say so
            client = self._client = self._client or self._target.connect()
        try:
            return work(client, call)
        except (RedisConnectionError, RedisClusterException, DeadlinePassedError):
            if isinstance(client, RedisCluster):
                self._client = None  # the next call learns the slots anew, from any node that the URL names
            raise

    def _judge(self, error: Exception, call: Call, attempt: Attempt) -> KvtierError:
        """What callers are told of `error`, and the breaker of the attempt."""
        address = self._target.address
        if self._is_closed:
            return self._closed_error()
        if isinstance(error, DeadlinePassedError) and not call.was_begun:
            return RedisUnavailableError(f"all threads for {address} were busy for {self._timeout_s:g} s")
        text = self._explain(error)
        if isinstance(error, ResponseError):
            attempt.succeeded()
        else:
            attempt.failed(text)
        return RedisFullError(text) if isinstance(error, OutOfMemoryError) else RedisUnavailableError(text)

    def _explain(self, error: Exception) -> str:
        if isinstance(error, DeadlinePassedError):
            return f"{self._target.address} did not answer within {self._timeout_s:g} s"
        text = f"{self._target.address}: {type(error).__name__}: {error}"
        for secret in self._target.secrets:  # a server may repeat the arguments of a command that it does not know
            text = text.replace(secret, "***")
        advice = next((advice for kind, advice in _ADVICE.items() if isinstance(error, kind)), None)
        return f"{text}; {advice}" if advice else text

    def _closed_error(self) -> RedisUnavailableError:
        return RedisUnavailableError(f"the connection to {self._target.address} was closed")


async def _until_let_go(job: Job[T], call: Call, timeout_s: float) -> None:
    """Returns when `job` is done, or at the deadline, or on cancellation; but never while a thread touches the page."""
    try:
        await job.wait(timeout_s)
    finally:
        if not job.is_done and not call.give_up():
            await _finish(job)


async def _finish(job: Job[T]) -> None:
    """Waits for `job` through cancellations, and is cancelled after it."""
    is_cancelled = False
    while not job.is_done:
        try:
            await job.wait(math.inf)
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError
