"""The tokens of long prompts, which lie in shared memory on their way to the daemon where that is possible."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from serving import IDENTITY, PAGE_SIZE, attach, eventually, pool_settings, small_config, some_tokens

from kvtier.client import AsyncSession, Client
from kvtier.client.convert import Tokens
from kvtier.daemon import token_file
from kvtier.daemon.server import running
from kvtier.errors import ConfigurationError, DeadlineError
from kvtier.launch import daemon_process

NUM_PAGES = 600  # 38,400 bytes of tokens
PROMPTS = [some_tokens(NUM_PAGES, seed=seed) for seed in (1, 2)]
NUM_TOKENS = NUM_PAGES * PAGE_SIZE


async def publish(session: AsyncSession, prompt: Tokens) -> None:
    lease = await session.acquire("tenant", b"", reserve_pages=NUM_PAGES)
    await lease.commit(prompt, lease.reserved_pages)
    await lease.release()


async def found_tokens(session: AsyncSession, prompt: Tokens) -> int:
    lease = await session.acquire("tenant", prompt)
    await lease.release()
    return lease.matched_tokens.device


class Sent:
    """The fields of the acquires of a session."""

    def __init__(self) -> None:
        self.fields: list[dict[str, Any]] = []

    @classmethod
    async def watching(cls, session: AsyncSession, monkeypatch: pytest.MonkeyPatch) -> Sent:
        sent, stream = cls(), await session.stream()
        call = stream.call

        def recorded(kind: str, timeout_s: float, **fields: Any) -> Any:
            if kind == "acquire":
                sent.fields.append(fields)
            return call(kind, timeout_s, **fields)

        monkeypatch.setattr(stream, "call", recorded)
        return sent

    @property
    def bytes_in_file(self) -> list[int]:
        return [fields.get("token_file_bytes", 0) for fields in self.fields]


async def test_a_long_prompt_lies_in_the_file_and_a_short_one_in_the_message(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(small_config(directory, 1300)), await attach(directory) as session:
        for prompt in PROMPTS:
            await publish(session, prompt)
        sent = await Sent.watching(session, monkeypatch)
        assert [await found_tokens(session, prompt) for prompt in PROMPTS] == [NUM_TOKENS, NUM_TOKENS]
        assert await found_tokens(session, PROMPTS[0][: 3 * PAGE_SIZE]) == 3 * PAGE_SIZE
        assert sent.bytes_in_file == [4 * NUM_TOKENS, 4 * NUM_TOKENS, 0]


async def test_of_two_at_once_one_lies_in_the_message(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(small_config(directory, 1300)), await attach(directory) as session:
        await publish(session, PROMPTS[1])
        sent = await Sent.watching(session, monkeypatch)
        for _ in range(5):
            assert await asyncio.gather(*(found_tokens(session, prompt) for prompt in PROMPTS)) == [0, NUM_TOKENS]
        assert sent.bytes_in_file == [4 * NUM_TOKENS, 0] * 5


async def test_what_is_longer_than_the_file_lies_in_the_message(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(small_config(directory, 700)), await attach(directory) as session:
        await publish(session, PROMPTS[0])
        sent = await Sent.watching(session, monkeypatch)
        longest, longer = (
            PROMPTS[0].tobytes() + bytes(num_bytes - 4 * NUM_TOKENS) for num_bytes in (1 << 20, (1 << 20) + 4)
        )
        assert [await found_tokens(session, prompt) for prompt in (longest, longer)] == [NUM_TOKENS, NUM_TOKENS]
        assert sent.bytes_in_file == [1 << 20, 0]


async def test_without_memory_for_the_file_all_lies_in_messages(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str, num_bytes: int) -> None:
        raise ConfigurationError(f"{num_bytes:,} bytes of shared memory do not fit")

    monkeypatch.setattr(token_file, "SharedMemory", refuse)
    async with running(small_config(directory, 700)), await attach(directory) as session:
        await publish(session, PROMPTS[0])
        sent = await Sent.watching(session, monkeypatch)
        assert await found_tokens(session, PROMPTS[0]) == NUM_TOKENS
        assert sent.bytes_in_file == [0]
    assert "tokens travel in messages, which takes longer: 1,048,576 bytes of shared memory do not fit" in caplog.text


async def test_without_access_to_the_file_all_lies_in_messages(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_file.TokenFile, "path", "/dev/shm/kvtier-of-another-machine")
    async with running(small_config(directory, 700)), await attach(directory) as session:
        await publish(session, PROMPTS[0])
        sent = await Sent.watching(session, monkeypatch)
        assert await found_tokens(session, PROMPTS[0]) == NUM_TOKENS
        assert sent.bytes_in_file == [0]


async def test_tokens_that_nobody_waits_for_do_not_get_in_the_way_of_the_next(directory: Path) -> None:
    """The daemon hangs; when it goes on, the file has the tokens of the second request, and it answers both."""
    with daemon_process(directory, redis="none", **pool_settings(1300)) as daemon:
        async with await AsyncSession.connect(daemon.address, IDENTITY, timeout_s=2.0) as session:
            await publish(session, PROMPTS[1])
            os.kill(daemon.process.pid, signal.SIGSTOP)
            try:
                with pytest.raises(DeadlineError):
                    await session.acquire("tenant", PROMPTS[0])
                second = asyncio.create_task(session.acquire("tenant", PROMPTS[1]))
                await asyncio.sleep(0.1)
            finally:
                os.kill(daemon.process.pid, signal.SIGCONT)
            lease = await second
            assert lease.matched_tokens.device == NUM_TOKENS
            with Client(daemon.address) as client:
                await eventually(lambda: client.statistics().caches[0].leases == 1)  # the first was given back
            await lease.release()


async def test_the_file_ends_with_its_session(directory: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    async with running(small_config(directory)):
        async with await attach(directory):
            (file,) = (path for path in set(Path("/dev/shm").iterdir()) - before if "tokens" in path.name)
            assert file.stat().st_mode & 0o777 == 0o600
        async with asyncio.timeout(10):
            while file.exists():
                await asyncio.sleep(0.01)
