"""What the ranks of a tensor-parallel worker agree on, and how a process becomes one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed

from kvtier.client import Session, connect
from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import Recipe
from kvtier.worker.model import WorkerModel, device_uuids
from kvtier.worker.options import WorkerOptions

LoadModel = Callable[[], WorkerModel]
"""Gives the whole model on the CPU. It goes to other processes: a function of a module, or a `partial` of one."""


class GroupSettings(NamedTuple):
    """What all ranks of a worker agree on.

    Attributes:
        rendezvous: a file that is not there yet, in which the ranks find each other.
        step_timeout_s: how long ranks wait for each other within a step.
        timeout_s: deadline of every call to the daemon.
    """

    address: str
    load: LoadModel
    devices: tuple[torch.device, ...]
    page_format: PageFormat
    page_size: int
    options: WorkerOptions
    recipe: Recipe | None
    rendezvous: str
    step_timeout_s: float
    timeout_s: float

    def recipe_of(self, model: WorkerModel) -> Recipe:
        """How values of `model` become codes."""
        return self.recipe or model.default_recipe(self.page_format)


@contextlib.contextmanager
def joined(settings: GroupSettings, rank: int) -> Iterator[None]:
    """Makes this process `rank` of the group, for the time of a block."""
    device = settings.devices[rank]
    if device.type == "cuda":
        torch.cuda.set_device(device)  # where torch's collectives look for it
    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{settings.rendezvous}",
        rank=rank,
        world_size=len(settings.devices),
        timeout=timedelta(seconds=settings.step_timeout_s),
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def attach(settings: GroupSettings, model: WorkerModel) -> Session:
    """A session for the part of the model that this rank computes."""
    options = settings.options
    identity = model.identity(
        settings.page_format,
        settings.page_size,
        options.prefill_attends,
        options.open_page,
        settings.recipe_of(model),
    )
    uuids = device_uuids(settings.devices)
    return connect(settings.address, identity, device_uuids=uuids, timeout_s=settings.timeout_s)
