"""The thread behind the blocking client: one for all sessions of a process, and another after a fork."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from serving import IDENTITY, small_config

from kvtier.client import connect
from kvtier.client.sync import _loop_thread, _start_loop
from kvtier.daemon.server import running

# Without a session: gRPC itself is not made for a fork.
FORK = """
import asyncio, os
from kvtier.client.sync import _loop_thread

def answer():
    return _loop_thread().run(asyncio.sleep(0, 3))

before = answer()
child = os.fork()
if child == 0:
    os._exit(10 + answer())
print(before, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvtier-client"]


async def test_sessions_share_a_thread(directory: Path) -> None:
    def use_two() -> None:
        with connect(address, IDENTITY) as first, connect(address, IDENTITY) as second:
            assert len(client_threads()) == 1
            assert first.acquire("tenant", b"", reserve_pages=2).reserved_pages.size == 2
            first.close()
            assert second.acquire("tenant", b"", reserve_pages=3).reserved_pages.size == 3

    address = f"unix:{directory}/kvtier.sock"
    async with running(small_config(directory)):
        await asyncio.to_thread(use_two)


def test_threads_that_connect_at_the_same_time_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(client_threads())
    _start_loop.cache_clear()
    monkeypatch.setattr(asyncio, "new_event_loop", slow_new_event_loop)
    with ThreadPoolExecutor(4) as threads:
        loops = set(threads.map(lambda _: _loop_thread(), range(4)))
    assert len(loops) == 1
    assert len(client_threads()) == before + 1


def slow_new_event_loop() -> asyncio.AbstractEventLoop:
    time.sleep(0.05)  # the others come in the meantime
    return asyncio.SelectorEventLoop()


def test_a_forked_child_has_a_thread_of_its_own() -> None:
    forked = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=30)
    assert forked.stdout == "3 13\n"
