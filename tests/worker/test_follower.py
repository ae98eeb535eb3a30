"""The pools that a rank other than 0 computes on."""

from __future__ import annotations

import dataclasses
import multiprocessing
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from serving import directory
from tiny_models import PAGE_SIZE, tiny_model

from kvtier.client import connect
from kvtier.errors import LeaseLostError
from kvtier.launch import DaemonProcess, daemon_process
from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import PLAIN
from kvtier.worker import WorkerOptions
from kvtier.worker.chunk import Chunk
from kvtier.worker.follower import _Follower, _Rank0, _Rank0Gone
from kvtier.worker.group import GroupSettings, attach
from kvtier.worker.ranks import AWAY, READY
from kvtier.worker.step_messages import Step, StepEncoder

__all__ = ["directory"]

MODEL = dataclasses.replace(tiny_model("llama"), rank=1, world_size=2)


@pytest.fixture
def daemon_of_one_cache(directory: Path) -> Iterator[DaemonProcess]:
    with daemon_process(directory, device_bytes=8 << 20, host_bytes=8 << 20, redis="none") as process:
        yield process


def settings_for(address: str) -> GroupSettings:
    return GroupSettings(
        address=address,
        load=lambda: MODEL,
        devices=(torch.device("cpu"),) * 2,
        page_format=PageFormat.BF16,
        page_size=PAGE_SIZE,
        options=WorkerOptions(),
        recipe=PLAIN,
        rendezvous="",
        step_timeout_s=10.0,
        timeout_s=10.0,
    )


def use_another_model(address: str) -> None:
    other = dataclasses.replace(MODEL, name="another model", rank=0, world_size=1)
    with connect(address, other.identity(PageFormat.BF16, PAGE_SIZE)):
        pass


def test_it_is_not_on_a_pool_that_the_same_daemon_has_replaced(daemon_of_one_cache: DaemonProcess) -> None:
    """Its cache was closed for another model's while all ranks were away."""
    settings = settings_for(daemon_of_one_cache.address)
    with attach(settings, MODEL) as session:
        epoch = session.epoch
        follower = _Follower(session, MODEL, settings)
        before = follower._runner(session.pool.pool_id, 10.0)
        assert follower._runner(session.pool.pool_id, 10.0) is before
    use_another_model(daemon_of_one_cache.address)
    with attach(settings, MODEL) as session:
        assert session.epoch == epoch
        follower._session = session  # as if it had attached anew
        runner = follower._runner(session.pool.pool_id, 10.0)
        assert runner is not before
        memory = session.pool.memory
        assert isinstance(memory, np.ndarray)
        memory[3] = 7
        assert (runner.pages.views[0].k_data[3].view(torch.uint8) == 7).all()


def test_it_says_whether_it_has_a_pool_and_computes_no_step_that_comes_too_late(
    daemon_of_one_cache: DaemonProcess,
) -> None:
    settings = settings_for(daemon_of_one_cache.address)
    encoder = StepEncoder()
    ours, theirs = multiprocessing.Pipe()
    raised: list[BaseException] = []

    def run(follower: _Follower) -> None:
        try:
            follower.run(_Rank0(theirs))
        except (_Rank0Gone, LeaseLostError) as error:
            raised.append(error)

    with attach(settings, MODEL) as session:
        thread = threading.Thread(target=run, args=(_Follower(session, MODEL, settings),))
        thread.start()
        pool_id = session.pool.pool_id
        for asked, answer in ((pool_id, READY), ("another", AWAY), (pool_id, READY)):
            ours.send_bytes(encoder.encode(Step(asked, 0.0, [])))
            assert ours.poll(20)
            assert ours.recv_bytes() == answer
        before = np.array(session.pool.memory)
        late = Step(pool_id, time.monotonic() - 1e-3, [Chunk([1, 2], 0, [3], 0)])
        ours.send_bytes(encoder.encode(late))
        thread.join(20)
        assert not thread.is_alive()
        assert isinstance(raised[0], LeaseLostError)
        np.testing.assert_array_equal(session.pool.memory, before)
