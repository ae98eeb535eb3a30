"""The asyncio client of a worker: a session that attaches anew by itself, and leases that fence themselves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Iterable, Sequence
from types import TracebackType

import grpc
import numpy as np

from kvtier.client.channel import OPTIONS, TlsFiles, check_address
from kvtier.client.convert import PageNumbers, Tokens, page_numbers, token_bytes, tokens_by_tier
from kvtier.client.pool import PoolMapping
from kvtier.client.stream import Stream
from kvtier.errors import (
    ConfigurationError,
    DaemonUnavailableError,
    InvalidRequestError,
    KvtierError,
    LeaseLostError,
    SessionLostError,
)
from kvtier.pages.chain import check_namespace
from kvtier.pages.fingerprint import CacheIdentity
from kvtier.protocol import extra_keys_to_messages
from kvtier.results import CommitResult
from kvtier.v1 import cache_pb2 as pb

ExtraKeys = Iterable[tuple[int, bytes]]
"""(token position, digest of 1 to 32 bytes): what else changes the KV of the same tokens from there on."""

_log = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 2.0
_NOBODY = "kvtier-nobody"  # a tenant without tokens


class AsyncSession:
    """A worker's session with a daemon. Use `connect`.

    When the stream breaks, calls under way raise `SessionLostError`, leases of it raise `LeaseLostError` from then on,
    and the session attaches anew in the background; the next `acquire` waits for it. `pool` is another mapping then, if
    the daemon started anew.
    """

    def __init__(
        self,
        address: str,
        identity: CacheIdentity,
        device_uuids: Sequence[str],
        timeout_s: float,
        tls: TlsFiles | None,
    ) -> None:
        self._address = check_address(address, tls)
        self._device_uuids = device_uuids
        self._tls = tls
        self._timeout_s = timeout_s
        self.identity = identity
        self._channel: grpc.aio.Channel | None = None
        self._stream: Stream | None = None
        self._pool: PoolMapping | None = None
        self._attached = asyncio.Event()
        self._last_error: KvtierError = DaemonUnavailableError(f"no daemon answered at {address} yet")
        self._keeper: asyncio.Task[None] | None = None
        self._is_closed = False

    @classmethod
    async def connect(
        cls,
        address: str,
        identity: CacheIdentity,
        *,
        device_uuids: Sequence[str] = (),
        timeout_s: float = 10.0,
        tls: TlsFiles | None = None,
    ) -> AsyncSession:
        """Attaches to the daemon at `address` (`unix:/path`, or HOST:PORT with `tls`).

        Args:
            identity: of a tensor-parallel model every rank attaches with its own, and rank 0 alone acquires.
            device_uuids: the GPUs that the ranks run on, in order, as nvidia-smi prints them: the pools are to lie
                there. None takes the pool where it is.
            timeout_s: the deadline of this and of every later call, beside the wait that an acquire asks for.

        Raises `DaemonUnavailableError`, or what the daemon says against identity and GPUs.
        """
        session = cls(address, identity, device_uuids, timeout_s, tls)
        try:
            await session._attach()
            await session._warm_up()
        except BaseException:
            await session.close()
            raise
        session._keeper = asyncio.create_task(session._keep_attached())
        return session

    @property
    def pool(self) -> PoolMapping:
        """The device pool as of the last attach. Its memory can be had while the session is attached."""
        assert self._pool is not None
        return self._pool

    @property
    def epoch(self) -> str:
        """Of the daemon that this session attached to last."""
        return self.pool.epoch

    async def _attach(self) -> None:
        await self._disconnect()
        if self._tls:
            try:
                credentials = self._tls.credentials()
            except OSError as error:
                raise ConfigurationError(f"cannot read the files of tls: {error}") from error
            self._channel = grpc.aio.secure_channel(self._address, credentials, OPTIONS)
        else:
            self._channel = grpc.aio.insecure_channel(self._address, OPTIONS)
        stream = Stream(self._channel, self._address)
        try:
            self._pool = await stream.open(self.identity, self._device_uuids, self._timeout_s)
        except SessionLostError as error:
            await stream.close()
            raise DaemonUnavailableError(str(error)) from error
        except BaseException:
            stream.end()
            raise
        self._stream = stream
        self._attached.set()

    async def _warm_up(self) -> None:
        """Acquires nothing, once: it makes the first real acquire of a process a fifth faster."""
        if self.identity.rank == 0:
            lease = await self.acquire(_NOBODY, b"")
            await lease.release()

    async def _keep_attached(self) -> None:
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                if self._stream is not None:
                    self._last_error = await asyncio.shield(self._stream.lost)
                    retry_s = _FIRST_RETRY_S
                    self.pool.let_go()
                await self._attach()
                continue
            except KvtierError as error:
                self._last_error = error
            except Exception as error:  # a task's edge: whatever it is, the session goes on trying, and says why
                _log.exception("a session at %s cannot attach", self._address)
                self._last_error = DaemonUnavailableError(f"cannot attach to {self._address}: {error!r}")
            self._stream = None
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _LAST_RETRY_S)

    async def stream(self) -> Stream:
        """The present stream; waits for one. Raises `DaemonUnavailableError` when none comes in time.

        Raises `SessionLostError` once the session is closed.
        """
        if self._is_closed:
            raise SessionLostError("the session is closed; connect anew")
        try:
            async with asyncio.timeout(self._timeout_s):
                while self._stream is None or self._stream.is_lost:
                    self._attached.clear()
                    await self._attached.wait()
        except TimeoutError:
            raise DaemonUnavailableError(f"not attached for {self._timeout_s:g} s: {self._last_error}") from None
        return self._stream

    async def acquire(
        self,
        namespace: str,
        tokens: Tokens,
        *,
        parent: AsyncLease | None = None,
        extra_keys: ExtraKeys = (),
        reserve_pages: int = 0,
        wait_s: float = 0.0,
        prefill_tokens_per_second: float = 0.0,
    ) -> AsyncLease:
        """A lease on the cached prefix of `tokens`, with `reserve_pages` to write.

        Args:
            namespace: the tenant; nothing is shared across namespaces.
            parent: a lease whose sequence `tokens` continue, behind its matched and committed pages.
            extra_keys: positions count from the start of the sequence.
            wait_s: how long to wait for pages in host memory and Redis; 0 takes what is on the device.
            prefill_tokens_per_second: the worker's own speed; what is slower to move than to recompute stays.

        Raises `CacheFullError` when the pages to reserve cannot be had, and `LeaseLostError` when `parent` is lost.
        """
        check_namespace(namespace)
        if not math.isfinite(wait_s):
            raise InvalidRequestError(f"wait_s is {wait_s}; give the seconds to wait")
        stream = parent.valid_stream() if parent else await self.stream()
        with stream.token_file.holding(token_bytes(tokens)) as token_fields:
            acquired: pb.AcquireResponse = await stream.call(
                "acquire",
                self._timeout_s + wait_s,
                namespace=namespace,
                parent_lease_id=parent.lease_id if parent else 0,
                extra_keys=extra_keys_to_messages(extra_keys),
                reserve_pages=reserve_pages,
                wait_ms=int(wait_s * 1000),
                prefill_tokens_per_second=prefill_tokens_per_second,
                **token_fields,
            )
        return AsyncLease(stream, self._timeout_s, acquired)

    async def _disconnect(self) -> None:
        if self._stream is not None:
            await self._stream.close()
            self._stream = None
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def close(self) -> None:
        """Ends the session and its leases."""
        # NOTE: Stream and pool go before anything is waited for: a close that is cancelled has closed all the same.
        self._is_closed = True
        if self._keeper is not None:
            self._keeper.cancel()
        if self._stream is not None:
            self._stream.end()
        self._let_go()
        if self._keeper is not None:
            # Gathered, so that a cancellation of whoever closes is not taken for the keeper's.
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._let_go()  # of what it attached to in its last moment
        await self._disconnect()

    def _let_go(self) -> None:
        if self._pool is not None and not self._pool.is_lost:
            self._pool.let_go()

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncLease:
    """A claim on pages: `matched_pages` to read, `reserved_pages` to write until they are committed.

    `matched_tokens` says in which tiers the prefix was found, `left_tokens` what did not come up in time.
    """

    def __init__(self, stream: Stream, timeout_s: float, acquired: pb.AcquireResponse) -> None:
        self._stream = stream
        self._timeout_s = timeout_s
        self.lease_id = acquired.lease_id
        self.matched_pages = page_numbers(acquired.matched_pages)
        self.reserved_pages = page_numbers(acquired.reserved_pages)
        self.matched_tokens = tokens_by_tier(acquired.matched_tokens)
        self.left_tokens = tokens_by_tier(acquired.left_tokens)

    @property
    def valid_until_s(self) -> float:
        """When its time is over, by this machine's monotonic clock, unless the session is lost before."""
        return self._stream.valid_until_s

    def check(self) -> None:
        """Raises `LeaseLostError` when the pages may be another's by now. Call it before every launch on them."""
        if self._stream.seconds_left <= 0:
            reason = self._stream.lost.result() if self._stream.is_lost else "the daemon has not answered for too long"
            raise LeaseLostError(f"lease {self.lease_id} is lost, acquire again: {reason}")

    def valid_stream(self) -> Stream:
        """The stream of this lease, checked."""
        self.check()
        return self._stream

    async def extend(self, num_pages: int) -> PageNumbers:
        """Reserves more pages and returns them; raises `CacheFullError`."""
        extended: pb.ExtendResponse = await self.valid_stream().call(
            "extend", self._timeout_s, lease_id=self.lease_id, reserve_pages=num_pages
        )
        pages = page_numbers(extended.reserved_pages)
        self.reserved_pages = np.concatenate([self.reserved_pages, pages])
        return pages

    async def commit(self, tokens: Tokens, pages: PageNumbers, extra_keys: ExtraKeys = ()) -> CommitResult:
        """Publishes reserved pages, in order, with the tokens that fill them.

        The worker promises that their bytes are final.
        """
        committed: pb.CommitResponse = await self.valid_stream().call(
            "commit",
            self._timeout_s,
            lease_id=self.lease_id,
            tokens=token_bytes(tokens),
            pages=np.asarray(pages).astype("<u4").tobytes(),
            extra_keys=extra_keys_to_messages(extra_keys),
        )
        self.reserved_pages = self.reserved_pages[~np.isin(self.reserved_pages, pages)]
        return CommitResult(committed.committed_tokens, committed.duplicate_pages)

    async def release(self) -> None:
        """Gives all pages back. A lost lease has nothing to give back: that is no error."""
        if not self._stream.is_lost:
            with contextlib.suppress(SessionLostError):
                await self._stream.call("release", self._timeout_s, lease_ids=[self.lease_id])
