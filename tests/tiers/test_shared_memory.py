"""Names of shared memory: who may remove them, and when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from kvtier.client.pool import PoolMapping
from kvtier.tiers.base import PoolHandle, SharedMemoryFile
from kvtier.tiers.shared_memory import SharedMemory, remove_stale

PREFIX = f"kvtier-test-shared-{os.getpid()}-"
NAME = f"{PREFIX}device"
PATH = Path("/dev/shm") / NAME
PAGE = 4096

OWNER = """
import subprocess, sys
from kvtier.tiers.shared_memory import SharedMemory
memory = SharedMemory(sys.argv[1], int(sys.argv[2]))
memory.memory[:] = 7
print(subprocess.Popen(["sleep", "60"], close_fds=False).pid, flush=True)
sys.stdin.read()
"""


def test_what_an_owner_leaves_is_removed_once_it_is_killed_whoever_else_lives() -> None:
    command = [sys.executable, "-c", OWNER, NAME, str(PAGE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        try:
            worker = PoolMapping(PoolHandle(SharedMemoryFile(str(PATH)), 1, PAGE), "epoch", "pool")
            assert remove_stale(PREFIX) == 0
            assert PATH.exists()
            owner.kill()
            owner.wait()
            assert remove_stale(PREFIX) == 1
            assert not PATH.exists()
            np.testing.assert_array_equal(worker.memory, np.full((1, PAGE), 7, np.uint8))
        finally:
            owner.kill()
            os.kill(child, signal.SIGKILL)


def test_closing_leaves_a_name_that_another_has_by_now() -> None:
    first = SharedMemory(NAME, PAGE)
    PATH.unlink()
    second = SharedMemory(NAME, PAGE)
    first.close()
    assert PATH.exists()
    second.close()
    assert not PATH.exists()
