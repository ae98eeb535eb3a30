"""One worker's session: a stream of requests, answered as they are done, and the leases that end with it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from kvtier.cache import PrefixCache, Wait
from kvtier.config import Config
from kvtier.daemon.registry import CacheRegistry
from kvtier.daemon.requests import MAX_WAIT_S, measured, prompt_from, tokens_message, wait_seconds
from kvtier.daemon.token_file import TokenFile
from kvtier.errors import DrainingError, InvalidRequestError, KvtierError, NotAttachedError
from kvtier.index import Lease
from kvtier.metrics import Metrics
from kvtier.pages.chain import extras_by_page
from kvtier.protocol import identity_from_message, pages_from_bytes, pages_to_bytes, pool_to_message
from kvtier.v1 import cache_pb2 as pb

_log = logging.getLogger(__name__)

_MAX_IN_FLIGHT = 256  # requests of one session; a worker that sends more waits for the stream


class Sessions:
    """All open sessions of a daemon."""

    def __init__(
        self, epoch: str, config: Config, registry: CacheRegistry, metrics: Metrics, memory_prefix: str
    ) -> None:
        self.epoch = epoch
        self.memory_prefix = memory_prefix
        self.config = config
        self.registry = registry
        self.metrics = metrics
        self.draining = False
        self.num_open = 0
        self._ids = itertools.count(1)
        self._ending: set[asyncio.Task[None]] = set()

    async def serve(
        self, requests: AsyncIterator[pb.SessionRequest], write: Callable[[pb.SessionResponse], Awaitable[None]]
    ) -> None:
        """Serves one stream to its end."""
        session = Session(next(self._ids), self, write)
        self.num_open += 1
        try:
            await session.serve(requests)
        finally:
            # NOTE: In a task of its own, because gRPC cancels this one when the worker goes, at times twice.
            ending = asyncio.create_task(self._end(session))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            await asyncio.shield(ending)

    async def _end(self, session: Session) -> None:
        await session.end()
        self.num_open -= 1

    async def close(self) -> None:
        """Returns when all sessions whose streams have ended are over."""
        if self._ending:
            await asyncio.wait(self._ending)


class Session:
    """One stream. Requests on the same lease are done in the order they came; all others side by side."""

    def __init__(
        self, session_id: int, sessions: Sessions, write: Callable[[pb.SessionResponse], Awaitable[None]]
    ) -> None:
        self.session_id = session_id
        self._sessions = sessions
        self._write = write
        self._write_turn = asyncio.Lock()
        self._attach_turn = asyncio.Lock()
        self._cache: PrefixCache | None = None
        self._rank = 0
        self._token_file: TokenFile | None = None
        self._lease_turns: dict[int, asyncio.Lock] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._writing: set[asyncio.Task[None]] = set()  # those of them that have only to write their answer
        self._room = asyncio.Semaphore(_MAX_IN_FLIGHT)
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        """Answers requests until the stream ends or the worker is silent for longer than its leases live."""
        silence_s = self._sessions.config.lease_ttl_s + self._sessions.config.grace_s
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(silence_s) as limit:
                async for request in requests:
                    # It is not silent, but has to wait: as long as those before it may, if it reads their answers.
                    limit.reschedule(clock() + MAX_WAIT_S + silence_s)
                    await self._room.acquire()
                    task = asyncio.create_task(self._answer(request))
                    self._running.add(task)
                    task.add_done_callback(self._done)
                    limit.reschedule(clock() + silence_s)
        except TimeoutError:
            _log.warning("session %d sent nothing for %.0f s; ending it", self.session_id, silence_s)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._room.release()

    async def _answer(self, request: pb.SessionRequest) -> None:
        response = pb.SessionResponse(request_id=request.request_id)
        kind = request.WhichOneof("request")
        try:
            with measured(kind or "unknown", self._sessions.metrics):
                handle = self._HANDLERS.get(kind)
                if handle is None:
                    raise InvalidRequestError("the request is empty, or of a newer release; update the daemon")
                getattr(response, kind).CopyFrom(await handle(self, getattr(request, kind)))
        except KvtierError as error:
            response.error.CopyFrom(pb.SessionError(code=error.status, kind=type(error).__name__, message=str(error)))
        task = asyncio.current_task()
        assert task is not None
        self._writing.add(task)
        try:
            with contextlib.suppress(grpc.aio.BaseError, asyncio.InvalidStateError):  # the worker has gone
                async with self._write_turn:
                    await self._write(response)
        finally:
            self._writing.remove(task)

    async def end(self) -> None:
        """Ends the session's leases; pages it could write are free after the grace time."""
        self._ended.set_result(None)
        # NOTE: What is under way may hold pages for this session, so its leases end only after it. Answers that a
        # worker does not read hold none, and may never be written.
        while self._running:
            _, pending = await asyncio.wait(self._running, timeout=self._sessions.config.grace_s)
            for unread in pending & self._writing:
                unread.cancel()
        if self._token_file is not None:
            self._token_file.close()
        if self._cache is None:
            return
        free_at = time.monotonic() + self._sessions.config.grace_s
        if num_leases := self._cache.lose_session(self.session_id, free_at):
            self._sessions.metrics.sessions_lost.inc()
            _log.info("session %d ended with %d leases open", self.session_id, num_leases)
        self._sessions.registry.detach(self._cache, self.session_id)

    # --- requests ----------------------------------------------------------------------------------------------------

    @property
    def _attached(self) -> PrefixCache:
        if self._cache is None:
            raise NotAttachedError("the session has not attached; send Attach first")
        return self._cache

    @contextlib.asynccontextmanager
    async def _turn(self, lease_id: int) -> AsyncIterator[Lease]:
        """A lease of this session for this request alone, in the order in which requests came."""
        leases = self._attached.index.leases
        leases.get(lease_id, self.session_id)
        async with self._lease_turns.setdefault(lease_id, asyncio.Lock()):
            yield leases.get(lease_id, self.session_id)

    async def _attach(self, request: pb.AttachRequest) -> pb.AttachResponse:
        async with self._attach_turn:
            return await self._attach_once(request)

    async def _attach_once(self, request: pb.AttachRequest) -> pb.AttachResponse:
        if self._cache is not None:
            raise NotAttachedError("the session has attached before; open another session for another model")
        if self._sessions.draining:
            raise DrainingError("the daemon is draining; attach to its successor")
        identity = identity_from_message(request.identity)
        self._cache = await self._sessions.registry.attach(identity, request.device_uuids, self.session_id)
        self._rank = identity.rank
        if self._rank == 0:
            self._token_file = TokenFile(f"{self._sessions.memory_prefix}tokens-{self.session_id}")
        return pb.AttachResponse(
            epoch=self._sessions.epoch,
            fingerprint=self._cache.identity.fingerprint,
            pool=pool_to_message(self._cache.ranks[self._rank].device.handle()),
            lease_ttl_ms=int(self._sessions.config.lease_ttl_s * 1000),
            session_id=self.session_id,
            pool_id=self._cache.pool_id,
            token_file=self._token_file.path if self._token_file else "",
            token_file_bytes=self._token_file.num_bytes if self._token_file else 0,
        )

    async def _acquire(self, request: pb.AcquireRequest) -> pb.AcquireResponse:
        cache = self._attached
        if self._token_file is None:
            raise InvalidRequestError(
                f"rank {self._rank} asks for a lease; rank 0 acquires for all ranks and tells the others, for page "
                "numbers are the same on all of them"
            )
        if self._sessions.draining:
            raise DrainingError("the daemon is draining and gives no new leases; attach to its successor")
        prompt = prompt_from(
            request.namespace,
            self._token_file.tokens_of(request),
            request.extra_keys,
            cache.identity.layout.page_size,
            request.prefill_tokens_per_second,
        )
        wait = Wait(wait_seconds(request.wait_ms), self._ended)
        parent = None
        if request.parent_lease_id:
            async with self._turn(request.parent_lease_id) as parent:
                pass  # what was asked of it before is done, and `acquire` takes its pages before it waits for anything
        acquired = await cache.acquire(self.session_id, prompt, parent, request.reserve_pages, wait)
        return pb.AcquireResponse(
            lease_id=acquired.lease.lease_id,
            matched_pages=pages_to_bytes(acquired.matched),
            reserved_pages=pages_to_bytes(acquired.reserved),
            matched_tokens=tokens_message(acquired.found),
            left_tokens=tokens_message(acquired.left),
        )

    async def _extend(self, request: pb.ExtendRequest) -> pb.ExtendResponse:
        async with self._turn(request.lease_id) as lease:
            reserved = await self._attached.extend(lease, request.reserve_pages)
            return pb.ExtendResponse(reserved_pages=pages_to_bytes(reserved))

    async def _commit(self, request: pb.CommitRequest) -> pb.CommitResponse:
        async with self._turn(request.lease_id) as lease:
            cache = self._attached
            extra_keys = ((extra.token_position, extra.digest) for extra in request.extra_keys)
            extras = extras_by_page(extra_keys, cache.identity.layout.page_size)
            result = await cache.commit(lease, request.tokens, extras, pages_from_bytes(request.pages))
            return pb.CommitResponse(committed_tokens=result.committed_tokens, duplicate_pages=result.duplicate_pages)

    async def _release(self, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        cache = self._attached
        lease_ids = sorted(set(request.lease_ids))
        for lease_id in lease_ids:
            cache.index.leases.get(lease_id, self.session_id)
        for lease_id in lease_ids:
            async with self._turn(lease_id) as lease:
                cache.release(lease)
            del self._lease_turns[lease_id]
        return pb.ReleaseResponse()

    async def _heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        return pb.HeartbeatResponse()

    _HANDLERS: dict[str | None, Callable[[Session, Any], Awaitable[Any]]] = {
        "attach": _attach,
        "acquire": _acquire,
        "extend": _extend,
        "commit": _commit,
        "release": _release,
        "heartbeat": _heartbeat,
    }
