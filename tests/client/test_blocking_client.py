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
from kvtier.errors import SessionLostError

def answer():
    return _loop_thread().run(asyncio.sleep(0, 3))

parents = _loop_thread()
before = answer()
child = os.fork()
if child == 0:
    parents.start(asyncio.sleep(0)), parents.finish(asyncio.sleep(0))  # there is nothing of the child's to give back
    try:
        parents.run(asyncio.sleep(0, 7))
    except SessionLostError:
        os._exit(10 + answer())
print(before, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), answer())
"""


# Suspended in a `with` block that nothing leaves: the generator is closed when the process ends.
SUSPENDED = """
import sys
sys.path.insert(0, {tests!r})
from contextlib import contextmanager
from serving import IDENTITY
from kvtier.client import connect

@contextmanager
def connected():
    with connect({address!r}, IDENTITY) as session:
        yield session

context = connected()
context.__enter__().acquire("tenant", b"", reserve_pages=2)
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


def test_a_forked_child_has_a_thread_of_its_own_and_cannot_use_its_parents() -> None:
    forked = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=30)
    assert forked.stdout == "3 13 3\n"


async def run_beside_a_daemon(script: str, directory: Path) -> str:
    async with running(small_config(directory)):
        source = script.format(tests=str(Path(__file__).parents[1]), address=f"unix:{directory}/kvtier.sock")
        command = [sys.executable, "-c", source]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_a_process_ends_although_a_session_was_never_left(directory: Path) -> None:
    assert await run_beside_a_daemon(SUSPENDED, directory) == ""


async def test_what_the_loop_thread_itself_gives_back_it_does_not_wait_for(directory: Path) -> None:
    """Garbage is collected there too."""

    def use() -> None:
        with connect(address, IDENTITY) as session, connect(address, IDENTITY) as dropped:
            lease = dropped.acquire("tenant", b"", reserve_pages=2)

            async def give_back() -> None:
                lease.release()
                dropped.close()

            _loop_thread().run(give_back())
            assert session.acquire("tenant", b"", reserve_pages=1).reserved_pages.size == 1

    address = f"unix:{directory}/kvtier.sock"
    async with running(small_config(directory)):
        await asyncio.to_thread(use)
