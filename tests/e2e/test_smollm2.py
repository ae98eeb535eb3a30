"""SmolLM2 135M Instruct, a real model: replies depend neither on the tier of the pages nor on a killed daemon."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import redis
import torch

from kvtier.launch import DaemonProcess, daemon_process
from kvtier.pages.chain import chain_keys, root_key
from kvtier.pages.envelope import PageName
from kvtier.pages.fingerprint import CacheIdentity
from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import find_recipe
from kvtier.tiers.embedded import stop_embedded_redis
from kvtier.tiers.redis import page_key
from kvtier.worker import (
    Conversation,
    Reply,
    Request,
    Worker,
    WorkerModel,
    WorkerOptions,
    connect_tensor_parallel,
    connect_worker,
    load_model,
    load_tokenizer,
)

MODEL = Path(__file__).parents[2] / "models" / "smollm2-135m-instruct"
PAGE_SIZE = 16
NEW_TOKENS = 12
SYSTEM = """\
You are the guide of a museum. Answer in one sentence, with these facts.
The lighthouse was built between 1871 and 1874 by the engineer Clara Vogt. It is 41 metres high and has 203 steps. The
tower is made of grey granite that was shipped from the mainland on 66 barges. The first lamp burned rapeseed oil; in
1902 it was replaced by a paraffin lamp, and in 1938 by an electric one. The last keeper left in 1983."""


@pytest.fixture(scope="module")
def model() -> WorkerModel:
    assert MODEL.is_dir(), "the model is missing: `make test` fetches it, or run scripts/fetch-model"
    torch.set_num_threads(1)
    return load_model(MODEL)


@pytest.fixture(scope="module")
def prompt(model: WorkerModel) -> tuple[int, ...]:
    return Conversation(load_tokenizer(MODEL), SYSTEM).ask("Who built the lighthouse?")


def wait_until_stored(directory: Path, identity: CacheIdentity, tokens: tuple[int, ...]) -> None:
    """Returns when the embedded Redis has every page of `tokens`: pages are written through in the background."""
    root = root_key(identity.fingerprint, "museum")
    keys = chain_keys(root, np.array(tokens, dtype="<u4").tobytes(), PAGE_SIZE, {})
    names = [page_key("museum", PageName(identity.fingerprint, key, identity.rank)) for key in keys]
    deadline = time.monotonic() + 20.0
    with redis.Redis(unix_socket_path=str(directory / "data" / "valkey.sock")) as client:
        while client.exists(*names) < len(names):
            assert time.monotonic() < deadline, "pages are not written through"
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("page_format", "recipe_name"),
    [*((page_format, "plain") for page_format in PageFormat), (PageFormat.NVFP4, "shipped")],
)
def test_replies_do_not_depend_on_the_tier(
    page_format: PageFormat, recipe_name: str, model: WorkerModel, prompt: tuple[int, ...], directory: Path
) -> None:
    recipe = find_recipe(recipe_name, model.revision)
    assert recipe.name.is_calibrated == (recipe_name == "shipped")
    identity = model.identity(page_format, PAGE_SIZE, recipe=recipe)
    asked_recipe = None if recipe_name == "shipped" else recipe  # the default ships
    page_bytes = identity.layout.page_bytes
    whole = len(prompt) // PAGE_SIZE * PAGE_SIZE
    num_pages = 32
    other_prompts = [(*prompt[start::-1], *prompt)[: 15 * PAGE_SIZE] for start in (-1, -2)]
    settings = {
        "device_bytes": num_pages * page_bytes,
        "host_bytes": 2 * num_pages * page_bytes,
        "redis": "embedded",
        "write_policy": "write_through",
    }
    options = WorkerOptions(promotion_wait_s=20.0, patience_s=60.0, recompute_when_cheaper=False)

    def ask(worker: Worker, tokens: tuple[int, ...] = prompt, count: int = NEW_TOKENS) -> Reply:
        return worker.generate(Request("museum", tokens, count))

    daemon = DaemonProcess.start(directory, **settings)
    try:
        with connect_worker(daemon.address, model, page_format, PAGE_SIZE, options, recipe=asked_recipe) as worker:
            assert ask(worker).statistics.found.total == 0
            from_device = ask(worker)
            for other in other_prompts:  # they push the first one out of the device pool
                ask(worker, other, 1)
                wait_until_stored(directory, identity, other)  # pages that wait to be written stay on the device
            from_host = ask(worker)
            wait_until_stored(directory, identity, prompt[:whole])
            daemon.kill()
            daemon = DaemonProcess.start(directory, **settings)
            from_redis = ask(worker)  # the same worker: it attaches anew by itself
    finally:
        daemon.stop()
        stop_embedded_redis(directory / "data")
    assert from_device.statistics.found == (whole, 0, 0)
    assert from_host.statistics.found.host > 0
    assert from_host.statistics.found.total == whole
    assert from_redis.statistics.found == (0, 0, whole)
    assert from_device.tokens == from_host.tokens == from_redis.tokens
    text = load_tokenizer(MODEL).decode(from_redis.tokens)
    assert "lighthouse" in text  # who built it hangs on a difference of logits that any quantisation may turn


def load_smollm2() -> WorkerModel:
    """In the process of every rank."""
    torch.set_num_threads(1)
    return load_model(MODEL)


@pytest.mark.slow
def test_three_ranks_reply_as_one_process_does(model: WorkerModel, prompt: tuple[int, ...], directory: Path) -> None:
    """Each with three of the nine query heads and one of the three KV heads, over NVFP4 pages with the recipe."""
    assert model.default_recipe(PageFormat.NVFP4).name.is_calibrated
    request = Request("museum", prompt, 40)
    with daemon_process(directory, device_bytes=64 << 20, host_bytes=64 << 20, redis="none", max_caches=2) as daemon:
        with connect_worker(daemon.address, model, page_size=PAGE_SIZE) as worker:
            alone = worker.generate(request)
        with connect_tensor_parallel(daemon.address, load_smollm2, ["cpu"] * 3, page_size=PAGE_SIZE) as worker:
            together, again = worker.generate(request), worker.generate(request)
    assert together.statistics.found.total == 0
    assert again.statistics.found.device == len(prompt) // PAGE_SIZE * PAGE_SIZE
    assert alone.tokens == together.tokens
    assert again.statistics.computed_tokens < PAGE_SIZE
