"""The pools that a rank other than 0 computes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from serving import directory
from tiny_models import PAGE_SIZE, tiny_model

from kvtier.client import connect
from kvtier.launch import DaemonProcess, daemon_process
from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import PLAIN
from kvtier.worker import WorkerOptions
from kvtier.worker.follower import _Follower
from kvtier.worker.group import GroupSettings, attach

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
        before = follower._runner(session.pool.pool_id)
        assert follower._runner(session.pool.pool_id) is before
    use_another_model(daemon_of_one_cache.address)
    with attach(settings, MODEL) as session:
        assert session.epoch == epoch
        follower._session = session  # as if it had attached anew
        runner = follower._runner(session.pool.pool_id)
        assert runner is not before
        memory = session.pool.memory
        assert isinstance(memory, np.ndarray)
        memory[3] = 7
        assert (runner.pages.views[0].k_data[3].view(torch.uint8) == 7).all()
