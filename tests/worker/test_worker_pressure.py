"""Workers where pages are few: requests wait, are cancelled or interrupted, and nothing of them is left."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from random_recipes import random_recipe
from scratch_pool import assert_same_reply
from small_daemon import FORMAT, IDENTITY, NUM_PAGES, held_pages, reference, settings, small_daemon, worker
from tiny_models import PAGE_SIZE, VOCAB_SIZE, random_tokens, tiny_model
from worker_fixtures import StartWorker, wait_until

from kvtier.client import Lease, Session, connect
from kvtier.errors import CacheFullError, InvalidRequestError
from kvtier.launch import DaemonProcess
from kvtier.pages.recipe import PLAIN, RecipeName
from kvtier.worker import (
    FinishReason,
    OpenPage,
    PrefillAttends,
    Request,
    Worker,
    WorkerModel,
    WorkerOptions,
    connect_worker,
)
from kvtier.worker.attention import ModelBatch

__all__ = ["settings", "small_daemon", "worker"]


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
    with connect_worker(small_daemon.address, model, FORMAT, PAGE_SIZE, options, recipe=PLAIN) as worker:
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
