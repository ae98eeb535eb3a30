"""Workers of the tests of the pool on a GPU, as processes of their own: `pool_worker.py MODE ADDRESS ...`."""

from __future__ import annotations

import contextlib
import sys
import time

import numpy as np
from gpu_pages import IDENTITY, PAGE_SIZE, TENANT, images_of, prompt, read_pages, write_pages

from kvtier.client import Session, connect
from kvtier.cuda_driver import CudaMemory
from kvtier.errors import CacheFullError, GpuError, LeaseLostError, SessionLostError

STEM_PAGES, NUM_STEMS, MAX_TAIL_PAGES, NUM_TAILS = 12, 6, 6, 8


def memory_of(session: Session) -> CudaMemory:
    memory = session.pool.memory
    assert isinstance(memory, CudaMemory)
    return memory


def turn(session: Session, tokens: np.ndarray, wait_s: float = 10.0) -> tuple[int, int]:
    """Acquires a prompt, checks every byte that it finds, writes and commits the rest; returns both page counts."""
    expected = images_of(tokens)
    lease = session.acquire(TENANT, tokens, wait_s=wait_s)
    try:
        found = lease.matched_pages.size
        np.testing.assert_array_equal(read_pages(memory_of(session), lease.matched_pages), expected[:found])
        if missing := len(expected) - found:
            pages = lease.extend(missing)
            write_pages(memory_of(session), pages, expected[found:])
            lease.check()
            lease.commit(tokens[found * PAGE_SIZE :], pages)
        return found, missing
    finally:
        lease.release()


def store(address: str, num_pages: str, seed: str) -> None:
    """Stores one prompt, and ends."""
    with connect(address, IDENTITY) as session:
        print(*turn(session, prompt(int(num_pages), int(seed))), flush=True)


def load(address: str, seed: str) -> None:
    """Takes turns for ever: stems that workers share, with tails behind."""
    random = np.random.default_rng(int(seed))
    with connect(address, IDENTITY, timeout_s=30) as session:
        while True:
            stem = prompt(STEM_PAGES, seed=int(random.integers(NUM_STEMS)))
            tail = prompt(int(random.integers(1, MAX_TAIL_PAGES + 1)), seed=1000 + int(random.integers(NUM_TAILS)))
            with contextlib.suppress(CacheFullError):
                turn(session, np.concatenate([stem, tail]), wait_s=float(random.choice([0.0, 0.05, 5.0])))


def outlive(address: str, num_pages: str, seed: str) -> None:
    """Reads its pages on and on while the daemon is killed, and says what came of it."""
    tokens = prompt(int(num_pages), int(seed))
    expected = images_of(tokens)
    session = connect(address, IDENTITY, timeout_s=3.0)
    turn(session, tokens)
    lease = session.acquire(TENANT, tokens, reserve_pages=2)
    memory = memory_of(session)
    print("ready", flush=True)
    outcome, deadline = "lease outlived its time", time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            lease.check()
        except LeaseLostError:
            outcome = "lease lost"
            break
        time.sleep(0.01)
    # What the lease forbids: that the process survives it is what is tested.
    try:
        images = read_pages(memory, lease.matched_pages)
        write_pages(memory, lease.reserved_pages, images[:2])
        stale = "memory readable" if np.array_equal(images, expected) else "memory is another's"
    except GpuError as error:
        stale = f"memory gone: {error}"
    try:
        _ = session.pool.memory
        held = "session holds the pool"
    except SessionLostError:
        held = "session let go"
    print(f"{outcome}; {held}; {stale}", flush=True)
    assert sys.stdin.readline() == "let go\n"
    del memory
    print("dropped", flush=True)
    assert sys.stdin.readline() == "end\n"
    session.close()


if __name__ == "__main__":
    {"store": store, "load": load, "outlive": outlive}[sys.argv[1]](*sys.argv[2:])
