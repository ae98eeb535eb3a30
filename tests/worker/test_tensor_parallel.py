"""A model spread over processes: it replies as in one, finds its pages in every tier, and says when a rank has gone."""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed
from random_recipes import random_recipe
from scratch_pool import assert_same_reply
from tiny_models import PAGE_SIZE, random_tokens, tiny_model
from worker_fixtures import StartWorker, wait_until

from kvtier.client import Client
from kvtier.errors import InvalidRequestError, RankLostError
from kvtier.launch import DaemonProcess, daemon_process
from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import PLAIN, Recipe, RecipeName
from kvtier.tiers.embedded import stop_embedded_redis
from kvtier.worker import PrefillAttends, Reply, Request, Worker, WorkerModel, WorkerOptions, connect_tensor_parallel

WORLD_SIZE = 2
REQUESTS = [Request("ranks", random_tokens(75, seed), 10) for seed in range(6)]  # 85 tokens: six pages


def load_tiny(architecture: str) -> WorkerModel:
    """A model of its own, since it is taken apart."""
    torch.set_num_threads(1)
    return tiny_model.__wrapped__(architecture)


def load_in_rank_0(error: Exception) -> WorkerModel:
    if multiprocessing.parent_process() is not None:
        raise error
    return load_tiny("llama")


@contextmanager
def worker_of_ranks(
    address: str,
    architecture: str = "llama",
    page_format: PageFormat = PageFormat.NVFP4,
    recipe: Recipe = PLAIN,
    world_size: int = WORLD_SIZE,
) -> Iterator[Worker]:
    options = WorkerOptions(prefill_attends=PrefillAttends.QUANTIZED, max_sequences=8, patience_s=20.0)
    with connect_tensor_parallel(
        address,
        functools.partial(load_tiny, architecture),
        ["cpu"] * world_size,
        page_format,
        PAGE_SIZE,
        options,
        recipe=recipe,
        step_timeout_s=30.0,
    ) as worker:
        yield worker


def assert_same_replies(
    first: list[Reply], second: list[Reply], page_format: PageFormat, recipe: Recipe = PLAIN, name: str = "llama"
) -> None:
    assert len(first) == len(second)
    for request, one, other in zip(REQUESTS, first, second, strict=False):
        assert one.error is other.error is None
        assert_same_reply(tiny_model(name), page_format, request.prompt, one.tokens, other.tokens, recipe=recipe)


@pytest.mark.parametrize(
    ("architecture", "page_format", "name"),
    [
        ("llama", PageFormat.NVFP4, RecipeName.FULL),
        ("gemma3", PageFormat.FP8, RecipeName.BALANCED),
    ],
)
def test_ranks_reply_as_one_process_does_and_find_their_pages(
    architecture: str, page_format: PageFormat, name: RecipeName, daemon: DaemonProcess, start_worker: StartWorker
) -> None:
    recipe = random_recipe(name, tiny_model(architecture))
    requests = REQUESTS[:3]
    alone = start_worker(architecture, page_format, PrefillAttends.QUANTIZED, recipe=recipe).run(requests)
    with worker_of_ranks(daemon.address, architecture, page_format, recipe) as worker:
        cold, warm = worker.run(requests), worker.run(requests)
    assert_same_replies(alone, cold, page_format, recipe, architecture)
    assert_same_replies(cold, warm, page_format, recipe, architecture)
    assert [reply.statistics.found.device for reply in cold] == [0] * 3
    assert [reply.statistics.found.device for reply in warm] == [64] * 3
    assert not torch.distributed.is_initialized()
    assert not multiprocessing.active_children()


@pytest.fixture
def small_daemon(directory: Path) -> Iterator[DaemonProcess]:
    """A daemon with 16 pages for each of two ranks on the device, 16 in host memory, and Redis."""
    bytes_of_all = 16 * WORLD_SIZE * rank_page_bytes()
    with daemon_process(
        directory, device_bytes=bytes_of_all, host_bytes=bytes_of_all, redis="embedded", grace_s=0.2
    ) as process:
        yield process


def rank_page_bytes() -> int:
    return tiny_model("llama").identity(PageFormat.NVFP4, PAGE_SIZE).layout.page_bytes // WORLD_SIZE


def test_replies_do_not_depend_on_the_tier(small_daemon: DaemonProcess, daemon: DaemonProcess) -> None:
    """36 pages are asked for where 16 are: they go to host memory and Redis, on both ranks."""
    with worker_of_ranks(daemon.address) as roomy:
        expected = roomy.run(REQUESTS)
    found = [0, 0, 0]
    with worker_of_ranks(small_daemon.address) as worker:
        for _ in range(2):
            replies = worker.run(REQUESTS)
            assert_same_replies(expected, replies, PageFormat.NVFP4)
            for reply in replies:
                found = [a + b for a, b in zip(found, reply.statistics.found, strict=True)]
    assert min(found[1:]) > 0, "nothing came back from host memory or Redis"


def test_a_worker_of_ranks_goes_on_with_a_new_daemon(
    small_daemon: DaemonProcess, directory: Path, daemon: DaemonProcess
) -> None:
    with worker_of_ranks(daemon.address) as roomy:
        expected = roomy.run(REQUESTS)
    with worker_of_ranks(small_daemon.address) as worker:
        sequences = [worker.submit(request) for request in REQUESTS]
        while len(sequences[0].generated) < 5:
            worker.step()
        small_daemon.kill()
        bytes_of_all = 16 * WORLD_SIZE * rank_page_bytes()
        settings = {"device_bytes": bytes_of_all, "host_bytes": bytes_of_all}
        try:
            with daemon_process(directory, **settings) as second:
                while not worker._running:
                    worker.step()
                second.kill()  # the other rank may not have attached to it yet
                for _ in range(3):
                    worker.step()
            with daemon_process(directory, **settings) as successor:
                while any(sequence.reply is None for sequence in sequences):
                    worker.step()
                with Client(successor.address) as client:
                    assert client.statistics().caches[0].identity.world_size == WORLD_SIZE
        finally:
            stop_embedded_redis(directory / "data")
    replies = [sequence.reply for sequence in sequences if sequence.reply]
    assert_same_replies(expected, replies, PageFormat.NVFP4)
    assert any(reply.statistics.restarts for reply in replies)


def test_idle_ranks_let_go_of_the_pools_of_a_dead_daemon(small_daemon: DaemonProcess, directory: Path) -> None:
    def lost_pools(process_id: int) -> int:
        maps = Path(f"/proc/{process_id}/maps").read_text().splitlines()
        return sum("/dev/shm/kvtier-" in line and line.endswith("(deleted)") for line in maps)

    bytes_of_all = 16 * WORLD_SIZE * rank_page_bytes()
    with worker_of_ranks(small_daemon.address) as worker:
        worker.generate(REQUESTS[0])
        (other,) = multiprocessing.active_children()
        assert other.pid
        small_daemon.kill()
        # It has room for pools of its own beside those, so that nobody has to let go for it.
        with daemon_process(directory, device_bytes=bytes_of_all, host_bytes=bytes_of_all, redis="none") as successor:
            with Client(successor.address) as client:
                wait_until(lambda: client.statistics().sessions == WORLD_SIZE)
            wait_until(lambda: lost_pools(os.getpid()) == lost_pools(other.pid or 0) == 0)


def load_and_tell(directory: Path) -> WorkerModel:
    """In rank 0 it takes a second longer than in the others."""
    loaded, early = directory / "loaded", directory / "early"
    if multiprocessing.parent_process() is not None:
        loaded.touch()
        return load_tiny("llama")
    wait_until(loaded.exists)
    time.sleep(1)
    if list(directory.glob("*/rendezvous")):
        early.touch()
    return load_tiny("llama")


def test_ranks_wait_for_each_other_only_once_all_are_loaded(
    daemon: DaemonProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model may take longer to load than a step may take."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    load = functools.partial(load_and_tell, tmp_path)
    with connect_tensor_parallel(daemon.address, load, ["cpu", "cpu"], PageFormat.NVFP4, PAGE_SIZE):
        assert list(tmp_path.glob("*/rendezvous"))
    assert not (tmp_path / "early").exists()
    assert not list(tmp_path.glob("kvtier-ranks-*"))


def test_a_rank_that_ends_is_an_error_and_not_a_hang(daemon: DaemonProcess) -> None:
    with worker_of_ranks(daemon.address) as worker:
        sequence = worker.submit(REQUESTS[0])
        while len(sequence.generated) < 5:
            worker.step()
        (other,) = multiprocessing.active_children()
        other.kill()
        for _ in range(2):  # and the next step says so too
            with pytest.raises(RankLostError, match="the process of rank 1 has ended with exit code -9"):
                worker.generate(REQUESTS[1])
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    "error", [InvalidRequestError("this rank has no model"), EOFError("the file of its weights is cut short")]
)
def test_what_fails_in_another_rank_ends_the_connecting(
    error: Exception, daemon: DaemonProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        pytest.raises(RankLostError, match="rank 1 has ended with exit code 1; its last output says why"),
        connect_tensor_parallel(daemon.address, functools.partial(load_in_rank_0, error), ["cpu", "cpu"]),
    ):
        pass
    assert str(error) in capfd.readouterr().err
    assert not multiprocessing.active_children()


def test_heads_that_cannot_be_shared_are_refused(daemon: DaemonProcess) -> None:
    with (
        pytest.raises(InvalidRequestError, match="4 query and 2 KV heads, which 3 ranks cannot share equally"),
        worker_of_ranks(daemon.address, world_size=3),
    ):
        pass
    assert not torch.distributed.is_initialized()
