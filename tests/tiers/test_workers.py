"""Worker threads and the gate before them."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref

import pytest

from kvtier.tiers.workers import Gate, Workers


@pytest.fixture
async def workers():
    workers = Workers(2, "test-worker")
    yield workers
    workers.close()


async def test_results_and_errors_come_back(workers):
    async def run(function):
        job = workers.submit(function)
        await job.wait(60)
        assert job.is_done
        return job.result()

    assert await run(lambda: 6 * 7) == 42
    assert await run(lambda: None) is None
    assert (await run(threading.current_thread)).name.startswith("test-worker-")
    with pytest.raises(ZeroDivisionError):
        await run(lambda: 1 // 0)
    with pytest.raises(KeyboardInterrupt):
        await run(lambda: (_ for _ in ()).throw(KeyboardInterrupt))


async def test_a_wait_can_end_before_the_job_and_be_taken_up_again(workers):
    release = threading.Event()
    job = workers.submit(lambda: release.wait(60))
    await job.wait(0.01)
    assert not job.is_done
    release.set()
    await job.wait(60)
    assert job.result() is True
    await job.wait(60)


async def test_idle_threads_hold_nothing_of_their_last_job(workers):
    class Memory:
        pass

    memory = Memory()
    gone = weakref.ref(memory)
    job = workers.submit(lambda held=memory: id(held))
    await job.wait(60)
    del memory, job
    async with asyncio.timeout(60):
        while gone() is not None:
            gc.collect()
            await asyncio.sleep(0.01)


async def test_close_lets_the_threads_end_after_what_was_submitted():
    workers = Workers(3, "closing-worker")
    jobs = [workers.submit(lambda number=number: number) for number in range(10)]
    workers.close()
    for number, job in enumerate(jobs):
        await job.wait(60)
        assert job.result() == number
    for thread in threading.enumerate():
        if thread.name.startswith("closing-worker"):
            thread.join(60)
            assert not thread.is_alive()


async def test_the_gate_keeps_to_its_bounds_and_the_order():
    gate = Gate(3, 100)
    inside: list[int] = []
    order: list[int] = []
    most_items = most_bytes = 0

    async def pass_through(number: int, num_bytes: int) -> None:
        nonlocal most_items, most_bytes
        await gate.enter(num_bytes)
        order.append(number)
        inside.append(num_bytes)
        most_items, most_bytes = max(most_items, len(inside)), max(most_bytes, sum(inside))
        for _ in range(random.Random(number).randrange(5)):
            await asyncio.sleep(0)
        inside.remove(num_bytes)
        gate.leave(num_bytes)

    sizes = [random.Random(number).randrange(101) for number in range(200)]
    await asyncio.gather(*(pass_through(number, size) for number, size in enumerate(sizes)))
    assert order == list(range(200))
    assert 1 < most_items <= 3
    assert 50 < most_bytes <= 100


async def test_what_is_larger_than_the_gate_goes_alone():
    gate = Gate(3, 100)
    await gate.enter(500)
    small = asyncio.create_task(gate.enter(1))
    await asyncio.sleep(0)
    assert not small.done()
    gate.leave(500)
    await small


async def test_whoever_is_cancelled_while_waiting_takes_no_place():
    gate = Gate(2, 100)
    await gate.enter(60)
    large, small = asyncio.create_task(gate.enter(60)), asyncio.create_task(gate.enter(10))
    await asyncio.sleep(0)
    assert not small.done()
    large.cancel()
    await small
    with pytest.raises(asyncio.CancelledError):
        await large
    # Cancelled at the very moment in which its turn comes: the place is free again.
    late = asyncio.create_task(gate.enter(90))
    await asyncio.sleep(0)
    gate.leave(60)
    gate.leave(10)
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    await gate.enter(50)
    await gate.enter(50)
