"""Pages that left the device: replies are the same, wherever a prefix comes from."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from random_recipes import random_recipe
from scratch_pool import assert_same_reply
from serving import Valkey
from small_daemon import FORMAT, IDENTITY, reference, settings, small_daemon, worker
from tiny_models import PAGE_SIZE, random_tokens, tiny_model
from worker_fixtures import StartWorker

from kvtier.client import TokensByTier
from kvtier.launch import DaemonProcess, daemon_process
from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import PLAIN, RecipeName
from kvtier.worker import PrefillAttends, Request, Worker, WorkerOptions, connect_worker

__all__ = ["settings", "small_daemon", "worker"]


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
        connect_worker(first.address, tiny_model("llama"), FORMAT, PAGE_SIZE, options, recipe=PLAIN) as worker,
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
