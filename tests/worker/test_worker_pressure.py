"""Workers where pages are few, leases are lost, and daemons go away: requests wait, begin anew, and reply the same."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import StartWorker
from scratch_pool import assert_same_reply
from tiny_models import PAGE_SIZE, VOCAB_SIZE, random_tokens, tiny_model

from kvtier.client import Client, TokensByTier, connect
from kvtier.errors import CacheFullError, DaemonUnavailableError, InvalidRequestError
from kvtier.launch import DaemonProcess, daemon_process
from kvtier.pages.layout import PageFormat
from kvtier.worker import FinishReason, PrefillAttends, Reply, Request, Worker

FORMAT = PageFormat.NVFP4
IDENTITY = tiny_model("llama").identity(FORMAT, PAGE_SIZE, PrefillAttends.QUANTIZED)
NUM_PAGES = 24


@pytest.fixture
def settings() -> dict[str, object]:
    """Of a daemon with 24 pages on the device, 16 in host memory, and Redis."""
    page_bytes = IDENTITY.layout.page_bytes
    return {"device_bytes": NUM_PAGES * page_bytes, "host_bytes": 16 * page_bytes, "redis": "embedded", "grace_s": 0.5}


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvtier-worker-") as name:
        yield Path(name)


@pytest.fixture
def small_daemon(directory: Path, settings: dict[str, object]) -> Iterator[DaemonProcess]:
    with daemon_process(directory, **settings) as process:
        yield process


@pytest.fixture
def worker(small_daemon: DaemonProcess, start_worker: StartWorker) -> Worker:
    """A worker on the small daemon."""
    return start_worker("llama", FORMAT, PrefillAttends.QUANTIZED, small_daemon.address, patience_s=0.3)


def reference(start_worker: StartWorker, request: Request) -> Reply:
    """The reply where there are pages enough."""
    return start_worker("llama", FORMAT, PrefillAttends.QUANTIZED).generate(request)


def held_pages(address: str) -> int:
    with Client(address) as client:
        (cache,) = client.statistics().caches
    held: int = cache.device.held_pages
    return held


def test_requests_wait_for_pages_and_older_ones_take_them(
    worker: Worker, small_daemon: DaemonProcess, start_worker: StartWorker
) -> None:
    """Six sequences that grow to ten pages each, where 24 are: the younger give way and come back."""
    requests = [Request("crowd", random_tokens(60 + seed, seed), 90) for seed in range(6)]
    replies = worker.run(requests)
    for request, reply in zip(requests, replies, strict=True):
        assert reply.finish_reason is FinishReason.LENGTH
        same = reference(start_worker, request)
        assert_same_reply(tiny_model("llama"), FORMAT, request.prompt, reply.tokens, same.tokens)
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
        with pytest.raises(CacheFullError, match="release leases"):
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


def test_pages_travel_through_all_tiers_and_back(worker: Worker, start_worker: StartWorker) -> None:
    """Four conversations on pools for two: every turn finds all that was computed before, and replies do not change."""
    conversations = {seed: random_tokens(80, seed) for seed in range(4)}
    found = TokensByTier(0, 0, 0)
    for turn in range(5):
        for seed, tokens in conversations.items():
            request = Request("tiers", [*tokens, *random_tokens(10, seed=100 * turn + seed)], 23)
            reply = worker.generate(request)
            computed_before = len(tokens) - 1 if turn else 0
            assert reply.statistics.found.total == computed_before // PAGE_SIZE * PAGE_SIZE, (turn, seed)
            found = TokensByTier(*(sum(pair) for pair in zip(found, reply.statistics.found, strict=True)))
            same = reference(start_worker, request)
            assert_same_reply(tiny_model("llama"), FORMAT, request.prompt, reply.tokens, same.tokens)
            conversations[seed] = [*request.prompt, *reply.tokens]
    assert min(found) > 0, f"a tier took no part: {found}"


@pytest.mark.parametrize("page_format", PageFormat)
def test_the_same_reply_from_device_host_and_redis(page_format: PageFormat, start_worker: StartWorker) -> None:
    """Exactly the same tokens, with fresh prefill: the bytes of a page do not depend on where it was."""
    page_bytes = tiny_model("qwen3").identity(page_format, PAGE_SIZE).layout.page_bytes
    pools = {"device_bytes": 16 * page_bytes, "host_bytes": 16 * page_bytes, "redis": "embedded"}
    request = Request("tenant", random_tokens(11 * PAGE_SIZE + 5), 24)
    with tempfile.TemporaryDirectory(prefix="kvtier-worker-") as name, daemon_process(Path(name), **pools) as daemon:
        worker = start_worker("qwen3", page_format, address=daemon.address)

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


def test_a_request_fails_when_no_daemon_comes_back(
    directory: Path, settings: dict[str, object], start_worker: StartWorker
) -> None:
    daemon = DaemonProcess.start(directory, **settings)
    worker = start_worker("llama", FORMAT, PrefillAttends.QUANTIZED, daemon.address, patience_s=0.1)
    sequence = worker.submit(Request("gone", random_tokens(30), 40))
    worker.step()
    daemon.kill()
    while sequence.reply is None:
        worker.step()
    assert isinstance(sequence.reply.error, DaemonUnavailableError)
    assert len(sequence.reply.tokens) >= 1
