"""The client on its own: what it refuses before it sends, that it attaches anew, that cancelling harms nobody."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import (
    IDENTITY,
    PAGE_SIZE,
    assert_true_pages,
    attach,
    eventually,
    only_cache,
    pool_settings,
    small_config,
    some_tokens,
    state_of,
    store,
)

from kvtier.client import AsyncLease, AsyncSession, Client, TokensByTier, connect
from kvtier.daemon.server import running
from kvtier.errors import (
    CacheFullError,
    DaemonUnavailableError,
    DeadlineError,
    InvalidRequestError,
    LeaseLostError,
    LeaseUnknownError,
    SessionLostError,
)
from kvtier.launch import DaemonProcess

PROMPT = some_tokens(4, seed=1)


async def test_no_daemon_is_said_with_what_to_do(directory: Path) -> None:
    with pytest.raises(DaemonUnavailableError, match="no daemon answers at unix:.*start one with `kvtier serve`"):
        await attach(directory)
    with Client(f"unix:{directory}/kvtier.sock") as client, pytest.raises(DaemonUnavailableError, match="kvtier serve"):
        client.statistics()


@pytest.mark.parametrize("address", ["127.0.0.1:9461", "localhost:1"])
def test_tcp_without_certificates_is_refused_before_anything_is_sent(address: str) -> None:
    with pytest.raises(InvalidRequestError, match="mutual TLS only"):
        connect(address, IDENTITY)
    with pytest.raises(InvalidRequestError, match="mutual TLS only"):
        Client(address)


BAD_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "no time": ({"wait_s": float("nan")}, "give the seconds to wait"),
    "for ever": ({"wait_s": float("inf")}, "give the seconds to wait"),
    "a tenant by number": ({"namespace": 7}, "name the tenant with 1 to 64"),
    "no tenant": ({"namespace": "n" * (17 << 20)}, "name the tenant with 1 to 64"),
    "too many extra keys": ({"extra_keys": [(0, b"x")] * 16_385}, "send 16,384"),
    "a fraction": ({"tokens": np.array([1.5])}, "give integer ids from 0 to"),
    "below zero": ({"tokens": np.array([-1])}, "give integer ids from 0 to"),
    "over 32 bits": ({"tokens": np.array([2**32])}, "give integer ids from 0 to"),
    "too many tokens": ({"tokens": bytes((15 << 20) + 4)}, "do not fit into one message; send at most 15,728,640"),
    "fewer than no pages": ({"reserve_pages": -1}, "acquire cannot be sent: Value out of range"),
    "pages over 32 bits": ({"reserve_pages": 2**32}, "acquire cannot be sent: Value out of range"),
    "a wait below none": ({"wait_s": -1.0}, "acquire cannot be sent: Value out of range"),
    "a key before the start": ({"extra_keys": [(-1, b"x")]}, "extra_keys cannot be sent"),
    "a key of text": ({"extra_keys": [(0, "text")]}, "extra_keys cannot be sent"),
}


@pytest.mark.parametrize("case", BAD_VALUES)
async def test_values_that_no_message_carries_are_refused_before_they_are_sent(case: str, directory: Path) -> None:
    values, advice = BAD_VALUES[case]
    async with running(small_config(directory)) as operator, await attach(directory) as session:
        before = state_of(operator)
        with pytest.raises(InvalidRequestError, match=advice):
            await session.acquire(**({"namespace": "tenant", "tokens": PROMPT} | values))
        assert state_of(operator) == before
        assert (await session.acquire("tenant", PROMPT)).lease_id == 2  # the first was nobody's, to warm up


async def test_tokens_may_be_any_integers_or_bytes(directory: Path) -> None:
    async with running(small_config(directory)), await attach(directory) as session:
        await store(session, "tenant", PROMPT)
        for tokens in (PROMPT, PROMPT.astype(np.int64), PROMPT.astype(">u4"), PROMPT.astype("<u4").tobytes()):
            lease = await session.acquire("tenant", tokens)
            assert lease.matched_tokens == TokensByTier(PROMPT.size, 0, 0)


async def test_a_lease_released_twice_is_unknown(directory: Path) -> None:
    async with running(small_config(directory)), await attach(directory) as session:
        lease = await session.acquire("tenant", PROMPT)
        await lease.release()
        with pytest.raises(LeaseUnknownError):
            await lease.release()


async def test_committed_pages_leave_the_reserved_ones(directory: Path) -> None:
    async with running(small_config(directory)), await attach(directory) as session:
        lease = await session.acquire("tenant", PROMPT, reserve_pages=2)
        more = await lease.extend(2)
        assert lease.reserved_pages.size == 4
        pages = lease.reserved_pages[[3, 0]]
        assert (await lease.commit(PROMPT[: 2 * PAGE_SIZE], pages)).committed_tokens == 2 * PAGE_SIZE
        assert lease.reserved_pages.tolist() == [lease.reserved_pages[0], more[0]]
        again = await session.acquire("tenant", PROMPT)
        assert again.matched_pages.tolist() == pages.tolist()


async def test_a_duplicate_commit_is_told_and_the_lease_goes_on(directory: Path) -> None:
    async with running(small_config(directory)) as operator, await attach(directory) as session:
        first = await session.acquire("tenant", b"", reserve_pages=4)
        twin = await session.acquire("tenant", b"", reserve_pages=4)
        two = PROMPT[: 2 * PAGE_SIZE]
        assert (await first.commit(two, first.reserved_pages[:2])).duplicate_pages == 0
        assert (await twin.commit(two, twin.reserved_pages[:2])).duplicate_pages == 2
        done = await twin.commit(PROMPT[2 * PAGE_SIZE :], twin.reserved_pages)
        assert (done.committed_tokens, done.duplicate_pages) == (PROMPT.size, 0)
        assert only_cache(operator).tree_pages == 4
        await twin.release()
        await first.release()
        cache = only_cache(operator)
        assert (cache.device.held_pages, cache.device.free_pages) == (0, 60)


async def test_a_session_attaches_anew_to_a_new_daemon_with_other_pools(directory: Path) -> None:
    async with running(small_config(directory)):
        session = await attach(directory, timeout_s=0.5)
        await store(session, "tenant", PROMPT)
        old_lease = await session.acquire("tenant", PROMPT, reserve_pages=1)
        old_pool, old_epoch = session.pool, session.epoch
        waiting = asyncio.create_task(old_lease.extend(1))
        assert (await waiting).size == 1
    await until_refused(session, "not attached for 0.5 s")
    async with running(small_config(directory, device_pages=8)):
        await until_refused(session, "set device_bytes to")  # what the daemon says against its pools
    async with running(small_config(directory, device_pages=16)) as operator:
        lease = await eventually_acquire(session)
        assert lease.matched_tokens == TokensByTier(0, 0, 0)
        assert session.epoch == operator.statistics().epoch != old_epoch
        assert session.pool is not old_pool
        assert (session.pool.num_pages, old_pool.num_pages) == (16, 64)
        for call in (lambda: old_lease.extend(1), lambda: old_lease.commit(PROMPT, old_lease.matched_pages)):
            with pytest.raises(LeaseLostError, match="acquire again"):
                await call()
        with pytest.raises(LeaseLostError):
            await session.acquire("tenant", PROMPT, parent=old_lease)
        await old_lease.release()
        await store(session, "tenant", PROMPT)
        again = await session.acquire("tenant", PROMPT)
        assert_true_pages(session, again, "tenant", PROMPT)
        assert again.matched_pages.size == 4
        await session.close()
        with pytest.raises(SessionLostError, match="the client closed it"):
            await again.extend(1)


async def until_refused(session: AsyncSession, reason: str) -> None:
    """Returns once the session is not attached for a given reason; a request under way may learn another first."""
    async with asyncio.timeout(20):
        while True:
            with pytest.raises((DaemonUnavailableError, SessionLostError)) as refused:
                await session.acquire("tenant", PROMPT)
            if reason in str(refused.value):
                assert refused.type is DaemonUnavailableError
                return


async def eventually_acquire(session: AsyncSession) -> AsyncLease:
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(DaemonUnavailableError):
                return await session.acquire("tenant", PROMPT)


async def test_cancelling_a_large_request_while_it_is_sent_leaves_the_session_alone(directory: Path) -> None:
    large = np.tile(PROMPT, 40_000)  # 10 MB: it takes the stream a while
    async with running(small_config(directory)) as operator, await attach(directory) as session:
        stays = await session.acquire("tenant", b"", reserve_pages=1)
        num_cancelled = 0
        for turns in (1, 2, 3, 4, 5, 8, 12, 20):
            task = asyncio.create_task(session.acquire("tenant", large))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            try:
                await (await task).release()
            except asyncio.CancelledError:
                num_cancelled += 1
        assert num_cancelled >= 4
        stays.check()
        assert (await stays.extend(1)).size == 1
        await eventually(lambda: only_cache(operator).leases == 1)
        assert state_of(operator).sessions == 1


async def test_a_close_that_is_cancelled_has_closed_all_the_same(directory: Path) -> None:
    async with running(small_config(directory)) as operator:
        for turns in range(4):
            session = await attach(directory)
            lease = await session.acquire("tenant", PROMPT, reserve_pages=1)
            closing = asyncio.create_task(session.close())
            for _ in range(turns):
                await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait({closing})
            if turns == 0:  # it had not begun
                lease.check()
                await session.close()
            with pytest.raises(LeaseLostError):
                lease.check()
            await eventually(lambda: operator.statistics().sessions == 0)


async def test_a_closed_session_says_so_at_once(directory: Path) -> None:
    async with running(small_config(directory)):
        session = await attach(directory)
        pool = session.pool
        await session.close()
        assert pool.is_lost
        with pytest.raises(SessionLostError, match="the session is closed"):
            await session.acquire("tenant", PROMPT)


async def test_a_release_that_nobody_waits_for_any_more_is_sent(directory: Path) -> None:
    """A daemon that stands still takes a part of a large request, and nothing behind it."""
    process = await asyncio.to_thread(DaemonProcess.start, directory, redis="none", metrics="off", **pool_settings())
    try:
        async with await attach(directory, timeout_s=1.0) as session, await attach(directory) as other:
            lease = await session.acquire("tenant", PROMPT, reserve_pages=60)
            process.process.send_signal(signal.SIGSTOP)
            large = asyncio.create_task(session.acquire("tenant", np.zeros(3 << 20, dtype=np.uint32)))
            await asyncio.sleep(0.1)
            with pytest.raises(DeadlineError, match="did not answer release"):
                await lease.release()
            with pytest.raises(DeadlineError, match="did not answer acquire"):
                await large
            process.process.send_signal(signal.SIGCONT)
            async with asyncio.timeout(20):
                while True:
                    with contextlib.suppress(CacheFullError):
                        await other.acquire("tenant", b"", reserve_pages=60)
                        break
                    await asyncio.sleep(0.01)
            assert not session._stream.is_lost
    finally:
        await asyncio.to_thread(process.stop)


async def test_the_blocking_client_does_the_same_from_several_threads(directory: Path) -> None:
    async with running(small_config(directory)) as operator:
        await asyncio.to_thread(use_from_threads, f"unix:{directory}/kvtier.sock")
        await eventually(lambda: operator.statistics().sessions == 0)
        cache = only_cache(operator)
        assert (cache.leases, cache.tree_pages) == (0, 4)


def use_from_threads(address: str) -> None:
    failures: list[BaseException] = []
    with connect(address, IDENTITY) as session:
        assert session.identity == IDENTITY
        lease = session.acquire("tenant", PROMPT)
        pages = lease.extend(4)
        assert lease.reserved_pages.tolist() == pages.tolist()
        assert lease.commit(PROMPT, pages).committed_tokens == PROMPT.size
        lease.check()
        lease.release()

        def use() -> None:
            try:
                for _ in range(20):
                    mine = session.acquire("tenant", PROMPT)
                    assert mine.matched_pages.tolist() == pages.tolist()
                    assert (mine.matched_tokens, mine.left_tokens) == ((PROMPT.size, 0, 0), (0, 0, 0))
                    child = session.acquire("tenant", b"", parent=mine)
                    child.release()
                    mine.release()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        left_open = session.acquire("tenant", PROMPT)
    with pytest.raises(LeaseLostError):
        left_open.check()


async def test_a_blocking_call_has_its_deadline(directory: Path) -> None:
    def hang() -> None:
        with connect(f"unix:{directory}/kvtier.sock", IDENTITY, timeout_s=0.2) as session:
            blocked.set()
            proceed.wait()
            with pytest.raises(DeadlineError, match="did not answer acquire within 0.2 s"):
                session.acquire("tenant", PROMPT)

    blocked, proceed = threading.Event(), threading.Event()
    async with running(small_config(directory)):
        hanging = asyncio.create_task(asyncio.to_thread(hang))
        await asyncio.to_thread(blocked.wait)
        proceed.set()
        threading.Event().wait(0.6)  # the daemon's event loop does nothing in this time
        await hanging


async def test_how_long_a_lease_is_good_is_known_beforehand_and_does_not_change_when_it_is_lost(
    directory: Path,
) -> None:
    """Other processes may compute on its pages for as long: what they were told holds although they hear no more."""
    async with running(small_config(directory, lease_ttl_s=60.0)), await attach(directory) as session:
        before_s = time.monotonic()
        lease = await session.acquire("tenant", PROMPT)
        valid_until_s = lease.valid_until_s
        assert before_s + 60.0 <= valid_until_s <= time.monotonic() + 60.0
        (await session.stream()).end()
        with pytest.raises(LeaseLostError):
            lease.check()
        assert lease.valid_until_s == valid_until_s
