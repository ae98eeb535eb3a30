"""One stream to one daemon, from Attach to its end. It does not come back: `AsyncSession` opens the next one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import grpc

from kvtier.client.channel import to_kvtier_error
from kvtier.client.pool import PoolMapping
from kvtier.client.token_file import TokenFile
from kvtier.errors import (
    ConfigurationError,
    DaemonUnavailableError,
    DeadlineError,
    InvalidRequestError,
    KvtierError,
    SessionLostError,
)
from kvtier.pages.fingerprint import CacheIdentity
from kvtier.protocol import identity_to_message, pool_from_message
from kvtier.v1 import cache_pb2 as pb
from kvtier.v1 import cache_pb2_grpc

_HEARTBEATS_PER_TTL = 3


class Stream:
    """Requests by id on a bidirectional stream; `open` it, then `call`."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._address = address
        self._call = cache_pb2_grpc.CacheServiceStub(channel).Session()
        self._outgoing: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()
        self._waiting: dict[int, asyncio.Future[pb.SessionResponse]] = {}
        self._ids = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self.lost: asyncio.Future[KvtierError] = asyncio.get_running_loop().create_future()
        self.token_file = TokenFile("", 0)
        self.lease_ttl_s = 0.0
        self.valid_until_s = 0.0  # of the monotonic clock, while the stream is not lost

    @property
    def is_lost(self) -> bool:
        return self.lost.done()

    @property
    def seconds_left(self) -> float:
        """How long leases of this stream may be used from now on, if the daemon answers nothing more."""
        return 0.0 if self.is_lost else self.valid_until_s - time.monotonic()

    async def open(self, identity: CacheIdentity, device_uuids: Sequence[str], timeout_s: float) -> PoolMapping:
        """Attaches and maps the pool."""
        self._start(self._read())
        self._start(self._write())
        attached: pb.AttachResponse = await self.call(
            "attach", timeout_s, identity=identity_to_message(identity), device_uuids=device_uuids
        )
        if attached.fingerprint != identity.of_rank(0).fingerprint:
            raise ConfigurationError(
                "daemon and worker compute different fingerprints of the same model; run one kvtier release in both"
            )
        self.token_file = TokenFile(attached.token_file, attached.token_file_bytes)
        self.lease_ttl_s = attached.lease_ttl_ms / 1000
        self.valid_until_s = time.monotonic() + self.lease_ttl_s
        self._start(self._beat())
        return PoolMapping(pool_from_message(attached.pool), attached.epoch, attached.pool_id)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def call(self, kind: str, timeout_s: float, **fields: Any) -> Any:
        """Sends one request of these fields and waits for its answer.

        Raises what the daemon answered, `DeadlineError` after `timeout_s`, `SessionLostError` when the stream ends, and
        `InvalidRequestError` for values that no message carries.
        """
        if self.is_lost:
            raise self.lost.result()
        # Given as a dictionary, the fields go straight into the message; as a message of its own, half a megabyte of
        # tokens would be copied once more, which takes longer than the lookup.
        try:
            request = pb.SessionRequest(request_id=next(self._ids), **{kind: fields})
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"{kind} cannot be sent: {error}") from error
        answer = self._waiting[request.request_id] = asyncio.get_running_loop().create_future()
        sent_at = time.monotonic()
        self._outgoing.put_nowait(request)
        try:
            async with asyncio.timeout(timeout_s):
                response = await answer
        except (TimeoutError, asyncio.CancelledError) as error:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self._disown(answer.result())
            if isinstance(error, asyncio.CancelledError):
                raise
            raise DeadlineError(f"the daemon at {self._address} did not answer {kind} within {timeout_s:g} s") from None
        finally:
            del self._waiting[request.request_id]
        # NOTE: Counted from the sending, not the answer: the daemon saw this worker alive no earlier than that.
        self.valid_until_s = max(self.valid_until_s, sent_at + self.lease_ttl_s)
        if response.HasField("error"):
            raise KvtierError.from_remote(response.error.kind, response.error.message)
        return getattr(response, kind)

    async def _write(self) -> None:
        # NOTE: A task of its own: gRPC ends the whole stream when a write is cancelled, as callers may be.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # the stream has ended: the reader says why
            while True:
                request = await self._outgoing.get()
                if request.request_id in self._waiting or request.HasField("release"):  # what is not wanted any more
                    await self._call.write(request)

    async def _read(self) -> None:
        error: BaseException = DaemonUnavailableError("the daemon ended the session")
        try:
            async for response in self._responses():
                if (answer := self._waiting.get(response.request_id)) is not None and not answer.done():
                    answer.set_result(response)
                else:
                    self._disown(response)
        except grpc.RpcError as rpc_error:
            error = rpc_error
        self._lose(error)

    def _responses(self) -> AsyncIterator[pb.SessionResponse]:
        return self._call.__aiter__()  # type: ignore[no-any-return]

    def _disown(self, response: pb.SessionResponse) -> None:
        """Gives back what came for a caller that does not wait any more."""
        if response.HasField("acquire"):
            self._start(self._give_back(response.acquire.lease_id))

    async def _give_back(self, lease_id: int) -> None:
        with contextlib.suppress(KvtierError):
            await self.call("release", self.lease_ttl_s, lease_ids=[lease_id])

    def _lose(self, error: BaseException) -> None:
        """Fails whoever waits."""
        if not self.lost.done():
            reason = to_kvtier_error(error, self._address) if isinstance(error, grpc.RpcError) else error
            self.lost.set_result(
                SessionLostError(f"the session at {self._address} ended, and its leases with it: {reason}")
            )
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self.lost.result())

    async def _beat(self) -> None:
        while not self.is_lost:
            await asyncio.sleep(self.lease_ttl_s / _HEARTBEATS_PER_TTL)
            # A heartbeat that fails needs no answer here: leases fence themselves when their time is over.
            with contextlib.suppress(KvtierError):
                await self.call("heartbeat", self.lease_ttl_s)

    def end(self) -> None:
        """Ends the stream; leases that are open end with it."""
        self._lose(DaemonUnavailableError("the client closed it"))
        self._call.cancel()
        self.token_file.close()
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Ends the stream, and returns when nothing of it is left."""
        self.end()
        await asyncio.gather(*self._tasks, return_exceptions=True)
