"""A worker on a daemon, in one call."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import torch
import torch.distributed

from kvtier.client import connect
from kvtier.errors import InvalidRequestError
from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import Recipe
from kvtier.worker.engine import Worker
from kvtier.worker.follower import follow
from kvtier.worker.group import GroupSettings, LoadModel, attach, joined
from kvtier.worker.model import WorkerModel, device_uuids
from kvtier.worker.options import DEFAULT_OPTIONS, WorkerOptions
from kvtier.worker.ranks import JOIN, LOADED, READY, RankProcess, Ranks
from kvtier.worker.shard import check_shards, shard_model


@contextmanager
def connect_worker(
    address: str,
    model: WorkerModel,
    page_format: PageFormat = PageFormat.NVFP4,
    page_size: int = 64,
    options: WorkerOptions = DEFAULT_OPTIONS,
    timeout_s: float = 10.0,
    recipe: Recipe | None = None,
) -> Iterator[Worker]:
    """A worker attached to the daemon at `address`; its leases end with the `with` block.

    `timeout_s` is the deadline of every call to the daemon, beside the wait for pages of lower tiers. `recipe` says how
    values become codes; None takes, for NVFP4 pages, the one that kvtier ships for these weights, else `SEARCH`.

    Raises `DaemonUnavailableError` when no daemon answers there, and `InvalidRequestError` when the recipe is another
    model's.
    """
    recipe = recipe or model.default_recipe(page_format)
    identity = model.identity(page_format, page_size, options.prefill_attends, options.open_page, recipe)
    with connect(address, identity, device_uuids=device_uuids([model.device]), timeout_s=timeout_s) as session:
        worker = Worker(session, model, identity.layout, options, recipe)
        with closing(worker):
            yield worker


@contextmanager
def connect_tensor_parallel(
    address: str,
    load: LoadModel,
    devices: Sequence[str],
    page_format: PageFormat = PageFormat.NVFP4,
    page_size: int = 64,
    options: WorkerOptions = DEFAULT_OPTIONS,
    timeout_s: float = 10.0,
    recipe: Recipe | None = None,
    load_timeout_s: float = 600.0,
    step_timeout_s: float = 120.0,
) -> Iterator[Worker]:
    """A worker whose model is spread over `devices`, one tensor-parallel rank each; see `connect_worker`.

    Rank 0 is this process; the others are processes of their own, which import the caller's main module: it needs the
    usual `if __name__ == "__main__"`. All of them end with the `with` block.

    Args:
        load: gives the whole model on the CPU, in the dtype of the arithmetic. It is called in every process, so it is
            a function of a module or a `partial` of one, such as `partial(load_model, path, dtype=torch.bfloat16)`.
        devices: of the ranks, such as "cuda:0" and "cuda:1".
        load_timeout_s: how long the other ranks may take until they are ready.
        step_timeout_s: how long ranks wait for each other within a step, and until all have attached to a new pool.

    Raises `RankLostError`, also later on, when the process of a rank ends, and `InvalidRequestError` when the model
    cannot be split among so many.
    """
    if torch.distributed.is_initialized():
        raise InvalidRequestError("torch.distributed is in use in this process; connect from a process of its own")
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-ranks-"))
        settings = GroupSettings(
            address,
            load,
            tuple(map(torch.device, devices)),
            page_format,
            page_size,
            options,
            recipe,
            str(Path(directory) / "rendezvous"),
            step_timeout_s,
            timeout_s,
        )
        others = [_start(settings, rank) for rank in range(1, len(devices))]
        ranks = Ranks(others, step_timeout_s)
        stack.callback(ranks.close)
        with ranks.together():
            model = load()
            check_shards(model, len(devices))  # before ranks wait for each other
            for other in others:
                other.wait(LOADED, load_timeout_s)
            for other in others:
                other.send(JOIN)
            stack.enter_context(joined(settings, 0))
            model = shard_model(model, settings.devices[0])
            session = stack.enter_context(attach(settings, model))
            for other in others:
                other.wait(READY, load_timeout_s)
        # The others go first: they wait for steps, and rank 0 has to leave the group with them.
        stack.callback(ranks.close)
        worker = Worker(session, model, session.identity.layout, options, settings.recipe_of(model), ranks)
        with closing(worker):
            yield worker


def _start(settings: GroupSettings, rank: int) -> RankProcess:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=follow, args=(theirs, settings, rank), name=f"kvtier-rank-{rank}", daemon=True)
    process.start()
    theirs.close()  # so that the end of the process is the end of the connection
    return RankProcess(rank, process, ours)
