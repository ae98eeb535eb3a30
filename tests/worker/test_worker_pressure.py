"""Workers where pages are few, leases are lost, and daemons go away: requests wait, begin anew, and reply the same."""

from __future__ import annotations

import itertools
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from random_recipes import random_recipe
from scratch_pool import assert_same_reply
from serving import Valkey
from tiny_models import PAGE_SIZE, VOCAB_SIZE, random_tokens, tiny_model
from worker_fixtures import StartWorker, wait_until

from kvtier.client import Client, Lease, Session, TokensByTier, connect
from kvtier.errors import CacheFullError, DaemonUnavailableError, InvalidRequestError
from kvtier.launch import DaemonProcess, daemon_process
from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import RecipeName
from kvtier.tiers.embedded import stop_embedded_redis
from kvtier.worker import (
    FinishReason,
    OpenPage,
    PrefillAttends,
    Reply,
    Request,
    Worker,
    WorkerModel,
    WorkerOptions,
    connect_worker,
)
from kvtier.worker.attention import ModelBatch

FORMAT = PageFormat.NVFP4
IDENTITY = tiny_model("llama").identity(FORMAT, PAGE_SIZE, PrefillAttends.QUANTIZED)
NUM_PAGES = 24


@pytest.fixture
def settings() -> dict[str, object]:
    """Of a daemon with 24 pages on the device, 16 in host memory, and Redis."""
    page_bytes = IDENTITY.layout.page_bytes
    return {"device_bytes": NUM_PAGES * page_bytes, "host_bytes": 16 * page_bytes, "redis": "embedded", "grace_s": 0.2}


@pytest.fixture
def small_daemon(directory: Path, settings: dict[str, object]) -> Iterator[DaemonProcess]:
    with daemon_process(directory, **settings) as process:
        yield process


@pytest.fixture
def worker(small_daemon: DaemonProcess, start_worker: StartWorker) -> Worker:
    """A worker on the small daemon."""
    return start_worker("llama", FORMAT, PrefillAttends.QUANTIZED, small_daemon.address, patience_s=2.0)


def reference(start_worker: StartWorker, request: Request) -> Reply:
    """The reply where there are pages enough."""
    return start_worker("llama", FORMAT, PrefillAttends.QUANTIZED).generate(request)


def held_pages(address: str) -> int:
    with Client(address) as client:
        (cache,) = client.statistics().caches
    held: int = cache.device.held_pages
    return held


@pytest.mark.parametrize("name", [RecipeName.PLAIN, RecipeName.BALANCED, RecipeName.FULL])
def test_requests_wait_for_pages_and_older_ones_take_them(
    name: RecipeName, small_daemon: DaemonProcess, start_worker: StartWorker
) -> None:
    """Six sequences that grow to ten pages each, where 24 are: the younger give way and come back."""
    recipe = random_recipe(name, tiny_model("llama"))
    worker, roomy = (
        start_worker("llama", FORMAT, PrefillAttends.QUANTIZED, recipe=recipe, **place)
        for place in ({"address": small_daemon.address}, {})
    )
    requests = [Request("crowd", random_tokens(60 + seed, seed), 90) for seed in range(6)]
    replies = worker.run(requests)
    for request, reply in zip(requests, replies, strict=True):
        assert reply.finish_reason is FinishReason.LENGTH
        same = roomy.generate(request)
        assert_same_reply(tiny_model("llama"), FORMAT, request.prompt, reply.tokens, same.tokens, OpenPage.BF16, recipe)
    assert replies[0].statistics.restarts == 0
    assert sum(reply.statistics.restarts for reply in replies) > 0
    assert held_pages(small_daemon.address) == 0


def test_a_request_that_can_never_fit_is_refused_at_once(worker: Worker) -> None:
    with pytest.raises(InvalidRequestError, match="need up to 25 pages and the device pool has 24"):
        worker.submit(Request("large", random_tokens(300), 24 * PAGE_SIZE - 299))
    with pytest.raises(InvalidRequestError, match="prompt and reply have up to 513 tokens; tiny llama takes 512"):
        worker.submit(Request("large", random_tokens(300), 213))
    with pytest.raises(InvalidRequestError, match=f"token {VOCAB_SIZE} is not in the vocabulary"):
        worker.submit(Request("large", [1, VOCAB_SIZE], 1))
    with pytest.raises(InvalidRequestError, match="token -3 is not in the vocabulary"):
        worker.submit(Request("large", [1, -3], 1))
    for no_token in (1.0, "1", None):
        with pytest.raises(InvalidRequestError, match="the prompt holds what is no token id: '(float|str|NoneType)'"):
            worker.submit(Request("large", [1, no_token], 1))
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        Request("large", [], 1)


def test_a_request_the_daemon_refuses_fails_alone(worker: Worker) -> None:
    bad, good = worker.run([Request("no such tenant!", [1, 2], 3), Request("good", [1, 2], 3)])
    assert isinstance(bad.error, InvalidRequestError)
    assert (bad.finish_reason, good.finish_reason) == (FinishReason.ERROR, FinishReason.LENGTH)


def test_a_request_fails_when_others_keep_the_pages(worker: Worker, small_daemon: DaemonProcess) -> None:
    request = Request("starved", random_tokens(40), 10)
    with connect(small_daemon.address, IDENTITY) as other:
        other.acquire("other", b"", reserve_pages=NUM_PAGES - 2)
        with pytest.raises(CacheFullError):
            worker.generate(request)
    assert worker.generate(request).finish_reason is FinishReason.LENGTH


def test_cancelled_requests_give_their_pages_back(worker: Worker, small_daemon: DaemonProcess) -> None:
    running, waiting = worker.submit(Request("cancel", random_tokens(40), 50)), None
    worker.step()
    waiting = worker.submit(Request("cancel", random_tokens(30), 50))
    assert held_pages(small_daemon.address) > 0
    worker.cancel(running)
    worker.cancel(waiting)
    assert held_pages(small_daemon.address) == 0
    for sequence in (running, waiting):
        assert sequence.reply is not None
        assert sequence.reply.finish_reason is FinishReason.CANCELLED
    assert len(running.generated) == 1


def test_a_request_cancelled_before_its_lease_comes_gives_its_pages_back(
    worker: Worker, small_daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although nobody steps any more."""
    cancelled, acquire = threading.Event(), Session.acquire

    def acquire_late(*args: Any, **settings: Any) -> Lease:
        lease = acquire(*args, **settings)
        assert cancelled.wait(20)
        return lease

    running = worker.submit(Request("cancel", random_tokens(40), 50))
    worker.step()
    monkeypatch.setattr(Session, "acquire", acquire_late)
    waiting = worker.submit(Request("cancel", random_tokens(30), 50))
    worker.step()
    worker.cancel(running)
    worker.cancel(waiting)
    cancelled.set()
    worker._admission._thread.shutdown()  # waits for it
    wait_until(lambda: held_pages(small_daemon.address) == 0)
    assert waiting.reply is not None
    assert waiting.reply.finish_reason is FinishReason.CANCELLED


def test_nothing_is_left_of_requests_that_were_not_run_to_their_end(
    worker: Worker, small_daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because another is refused, or because they are interrupted; what was submitted beside them goes on."""
    beside = worker.submit(Request("beside", random_tokens(30), 9))
    worker.step()
    request = Request("run", random_tokens(40), 50)
    with pytest.raises(InvalidRequestError, match="is not in the vocabulary"):
        worker.run([request, Request("run", [VOCAB_SIZE], 1)])

    def interrupt() -> None:
        Worker.step(worker)
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        worker.run([request] * 2)
    with pytest.raises(KeyboardInterrupt):
        worker.generate(request)
    monkeypatch.undo()
    assert (worker._running, worker._waiting) == ([beside], [])
    while beside.reply is None:
        worker.step()
    assert beside.reply.finish_reason is FinishReason.LENGTH
    wait_until(lambda: held_pages(small_daemon.address) == 0)


@pytest.mark.parametrize("ends", [False, True])
def test_an_interrupted_release_loses_no_sequence(
    ends: bool, worker: Worker, small_daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is finished, or waits to begin anew; its slot is free and its pages are given back."""
    sequence = worker.submit(Request("interrupted", random_tokens(40), 9))
    worker.step()

    def interrupt(_: Lease) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(Lease, "release", interrupt)
    with pytest.raises(KeyboardInterrupt):
        worker.cancel(sequence) if ends else worker._requeue(sequence)
    wait_until(lambda: held_pages(small_daemon.address) == 0)
    replies = worker.run([Request("others", random_tokens(20, seed), 3) for seed in range(8)])  # a slot for each
    assert [reply.finish_reason for reply in replies] == [FinishReason.LENGTH] * 8
    while sequence.reply is None:
        worker.step()
    assert sequence.reply.finish_reason is (FinishReason.CANCELLED if ends else FinishReason.LENGTH)


@dataclass(frozen=True)
class FailingModel(WorkerModel):
    """A model whose passes raise the errors in `failures` first, after they have written to pages."""

    failures: list[Exception] = field(default_factory=list)

    def forward(self, batch: ModelBatch, rows: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().forward(batch, rows)
        if self.failures:
            raise self.failures.pop()
        return logits


def test_a_pass_that_fails_gives_its_pages_back_and_its_requests_begin_anew(
    small_daemon: DaemonProcess, start_worker: StartWorker
) -> None:
    model = FailingModel(**vars(tiny_model("llama")))
    options = WorkerOptions(prefill_attends=PrefillAttends.QUANTIZED)
    request = Request("failing", random_tokens(40), 20)
    with connect_worker(small_daemon.address, model, FORMAT, PAGE_SIZE, options) as worker:
        sequence = worker.submit(request)
        for _ in range(5):
            worker.step()
        model.failures.append(MemoryError("no memory for the workspace"))
        with pytest.raises(MemoryError, match="no memory for the workspace"):
            worker.step()
        assert held_pages(small_daemon.address) == 0
        while sequence.reply is None:
            worker.step()
    assert (sequence.reply.finish_reason, sequence.reply.statistics.restarts) == (FinishReason.LENGTH, 1)
    same = reference(start_worker, request)
    assert_same_reply(tiny_model("llama"), FORMAT, request.prompt, sequence.reply.tokens, same.tokens)


def test_nothing_computed_is_lost_between_the_tiers(directory: Path, start_worker: StartWorker) -> None:
    """Three conversations with long beginnings, two of one tenant, on pools for two of them.

    Every turn finds all that was computed before, wherever it went, and replies as if it had never moved.
    """
    page_bytes = IDENTITY.layout.page_bytes
    pools = {"device_bytes": 48 * page_bytes, "host_bytes": 16 * page_bytes, "redis": "embedded"}
    tenants = ("first", "first", "second")
    conversations = [random_tokens(24 * PAGE_SIZE) for _ in tenants]
    found = TokensByTier(0, 0, 0)
    with daemon_process(directory, **pools) as small:
        worker = start_worker("llama", FORMAT, PrefillAttends.QUANTIZED, small.address, recompute_when_cheaper=False)
        for turn, (number, tenant) in itertools.product(range(8), enumerate(tenants)):
            tokens = conversations[number]
            request = Request(tenant, [*tokens, *random_tokens(7, seed=10 * turn + number)], 9)
            reply = worker.generate(request)
            if turn > 0:  # all but the last token of the reply before were computed
                assert reply.statistics.found.total == (len(tokens) - 1) // PAGE_SIZE * PAGE_SIZE, (turn, number)
            found = TokensByTier(*map(sum, zip(found, reply.statistics.found, strict=True)))
            same = reference(start_worker, request)
            assert_same_reply(tiny_model("llama"), FORMAT, request.prompt, reply.tokens, same.tokens)
            conversations[number] = [*request.prompt, *reply.tokens]
    assert min(found) > 0, f"a tier took no part: {found}"


@pytest.mark.parametrize(
    ("page_format", "name"),
    [
        *((page_format, RecipeName.PLAIN) for page_format in PageFormat),
        (PageFormat.NVFP4, RecipeName.BALANCED),
        (PageFormat.NVFP4, RecipeName.FULL),
    ],
)
def test_the_same_reply_from_device_host_and_redis(
    page_format: PageFormat, name: RecipeName, directory: Path, start_worker: StartWorker
) -> None:
    """Exactly the same tokens, with fresh prefill: the bytes of a page do not depend on where it was."""
    page_bytes = tiny_model("qwen3").identity(page_format, PAGE_SIZE).layout.page_bytes
    pools = {"device_bytes": 16 * page_bytes, "host_bytes": 16 * page_bytes, "redis": "embedded"}
    request = Request("tenant", random_tokens(11 * PAGE_SIZE + 5), 24)
    with daemon_process(directory, **pools) as daemon:
        recipe = random_recipe(name, tiny_model("qwen3"))
        worker = start_worker("qwen3", page_format, address=daemon.address, recipe=recipe, recompute_when_cheaper=False)

        def push_out(tenant: str, num_requests: int) -> None:
            for seed in range(num_requests):
                worker.generate(Request(tenant, random_tokens(14 * PAGE_SIZE, seed=seed + 1), 1))

        worker.generate(request)
        from_device = worker.generate(request)
        push_out("others", 1)
        from_host = worker.generate(request)
        push_out("more", 4)
        from_redis = worker.generate(request)
    assert from_device.statistics.found == (11 * PAGE_SIZE, 0, 0)
    assert from_host.statistics.found.host >= 9 * PAGE_SIZE
    assert from_redis.statistics.found == (0, 0, 11 * PAGE_SIZE)
    assert from_device.tokens == from_host.tokens == from_redis.tokens


def test_what_stays_in_lower_tiers_is_told(
    small_daemon: DaemonProcess, worker: Worker, start_worker: StartWorker
) -> None:
    """A worker that does not wait for pages computes them anew."""
    request = Request("hurry", random_tokens(10 * PAGE_SIZE + 3), 3)
    worker.generate(request)
    worker.generate(Request("others", random_tokens(20 * PAGE_SIZE, seed=1), 3))
    hasty = start_worker("llama", FORMAT, PrefillAttends.QUANTIZED, small_daemon.address, promotion_wait_s=0.0)
    statistics = hasty.generate(request).statistics
    assert statistics.left.host > 0
    assert statistics.found.device + statistics.left.total == 10 * PAGE_SIZE
    assert statistics.computed_tokens == len(request.prompt) - statistics.found.total


def test_others_decode_while_pages_come_up_from_redis(
    directory: Path, settings: dict[str, object], start_worker: StartWorker, valkey: Valkey
) -> None:
    """While Redis is stalled, the request whose prefix is there waits, and the other goes on."""
    settings |= {"redis": valkey.url, "redis_timeout_s": 60}
    stored = Request("stored", random_tokens(5 * PAGE_SIZE + 3), 20)
    options = WorkerOptions(prefill_attends=PrefillAttends.QUANTIZED)
    with (
        daemon_process(directory, **settings) as first,
        connect_worker(first.address, tiny_model("llama"), FORMAT, PAGE_SIZE, options) as worker,
    ):
        worker.generate(stored)
    with daemon_process(directory, **settings) as second:
        worker = start_worker(
            "llama", FORMAT, PrefillAttends.QUANTIZED, second.address, timeout_s=60.0, promotion_wait_s=60.0
        )
        running = worker.submit(Request("running", random_tokens(8), 30))
        worker.step()
        valkey.pause()
        waiting = worker.submit(stored)
        for num_generated in range(2, 8):
            worker.step()
            assert (len(running.generated), waiting.generated) == (num_generated, ())
        valkey.resume()
        while waiting.reply is None:
            worker.step()
    assert waiting.reply.statistics.found == (0, 0, 5 * PAGE_SIZE)
    same = reference(start_worker, stored)
    assert_same_reply(tiny_model("llama"), FORMAT, stored.prompt, waiting.reply.tokens, same.tokens)


def test_a_daemon_that_is_killed_and_starts_again(
    directory: Path, settings: dict[str, object], start_worker: StartWorker
) -> None:
    """Sequences under way begin anew on the new daemon and end with the tokens that they would have had."""
    requests = [Request("crash", random_tokens(30 + seed, seed), 40) for seed in range(3)]
    daemon = DaemonProcess.start(directory, **settings)
    try:
        worker = start_worker("llama", FORMAT, PrefillAttends.QUANTIZED, daemon.address)
        sequences = [worker.submit(request) for request in requests]
        for _ in range(12):
            worker.step()
        daemon.kill()
        daemon = DaemonProcess.start(directory, **settings)
        while any(sequence.reply is None for sequence in sequences):
            worker.step()
        for request, sequence in zip(requests, sequences, strict=True):
            assert sequence.reply is not None
            assert sequence.reply.statistics.restarts == 1
            same = reference(start_worker, request)
            assert_same_reply(tiny_model("llama"), FORMAT, request.prompt, sequence.reply.tokens, same.tokens)
        assert held_pages(daemon.address) == 0
    finally:
        daemon.stop()
        stop_embedded_redis(directory / "data")


def test_a_worker_without_work_keeps_no_memory_of_a_dead_daemon(
    directory: Path, settings: dict[str, object], start_worker: StartWorker
) -> None:
    """Else the next daemon might find too little for its own pool, for as long as nobody asks this worker anything."""
    with daemon_process(directory, **settings) as daemon:
        worker = start_worker("llama", FORMAT, PrefillAttends.QUANTIZED, daemon.address)
        worker.generate(Request("idle", random_tokens(30), 3))
        memory = weakref.ref(worker._session.pool.memory)
        assert memory() is not None
        daemon.kill()
        deadline = time.monotonic() + 30.0
        while memory() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
    assert memory() is None


def test_a_request_fails_when_no_daemon_comes_back(
    directory: Path, settings: dict[str, object], start_worker: StartWorker
) -> None:
    with daemon_process(directory, **settings) as daemon:
        worker = start_worker("llama", FORMAT, PrefillAttends.QUANTIZED, daemon.address, timeout_s=1.0, patience_s=0.1)
        sequence = worker.submit(Request("gone", random_tokens(30), 40))
        worker.step()
        daemon.kill()
        while sequence.reply is None:
            worker.step()
    assert isinstance(sequence.reply.error, DaemonUnavailableError)
    assert len(sequence.reply.tokens) >= 1


def test_a_daemon_that_hangs_keeps_no_worker_waiting_for_releases(
    directory: Path, settings: dict[str, object], start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases whose time is over are given back in the background; the daemon has them back when it wakes up."""
    with daemon_process(directory, **(settings | {"lease_ttl_s": 0.5, "grace_s": 30.0})) as process:
        worker = start_worker("llama", FORMAT, PrefillAttends.QUANTIZED, process.address)
        sequences = [worker.submit(Request("t", random_tokens(30, seed), 40)) for seed in range(3)]
        while len(worker._running) < 3:
            worker.step()
        process.process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(0.6)
            with monkeypatch.context() as patch:
                patch.setattr(Lease, "release", lambda _: pytest.fail("waits for a daemon that hangs"))
                worker._grow()
                assert not [sequence for sequence in sequences if worker._is_held(sequence)]
        finally:
            process.process.send_signal(signal.SIGCONT)
        while any(sequence.reply is None for sequence in sequences):
            worker.step()
        for sequence in sequences:
            assert sequence.reply is not None and sequence.reply.error is None
            assert sequence.reply.statistics.restarts > 0
        wait_until(lambda: held_pages(process.address) == 0)
