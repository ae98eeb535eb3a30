"""Gemma 3 270M, a real model of another geometry: windows of 512 tokens, head dimension 256, one KV head."""

from __future__ import annotations

from pathlib import Path

import pytest
from scratch_pool import assert_greedy, assert_same_reply
from tiny_models import PAGE_SIZE

from kvtier.launch import daemon_process
from kvtier.pages.layout import PageFormat
from kvtier.worker import (
    PrefillAttends,
    Reply,
    Request,
    WorkerModel,
    WorkerOptions,
    connect_worker,
    load_model,
    load_tokenizer,
)

MODEL = Path(__file__).parents[2] / "models" / "gemma-3-270m"
NUM_PAGES = 64
BF16_BOUND = 0.1
"""Of logits that reach from -20 to 20."""


@pytest.fixture(scope="module")
def model() -> WorkerModel:
    if not MODEL.is_dir():
        pytest.skip("fetch the model first: scripts/fetch-model gemma-3-270m")
    return load_model(MODEL)


@pytest.fixture(scope="module")
def prompt() -> tuple[int, ...]:
    """Longer than the window, with the answer at its end."""
    story = "The ferry from Port Anselm takes an hour, and the lighthouse can be seen from its deck. " * 32
    text = f"{story}\nQuestion: What is the capital of France?\nAnswer: The capital of France is"
    return tuple(load_tokenizer(MODEL)(text)["input_ids"])


def cold_and_cached(
    model: WorkerModel, prompt: tuple[int, ...], page_format: PageFormat, attends: PrefillAttends, directory: Path
) -> tuple[Reply, Reply]:
    page_bytes = model.identity(page_format, PAGE_SIZE).layout.page_bytes
    pools = {"device_bytes": NUM_PAGES * page_bytes, "host_bytes": NUM_PAGES * page_bytes, "redis": "none"}
    request = Request("tenant", prompt, 16)
    options = WorkerOptions(prefill_attends=attends)
    with (
        daemon_process(directory, **pools) as daemon,
        connect_worker(daemon.address, model, page_format, PAGE_SIZE, options) as worker,
    ):
        return worker.generate(request), worker.generate(request)


@pytest.mark.slow
def test_bf16_replies_are_those_of_transformers(model: WorkerModel, prompt: tuple[int, ...], directory: Path) -> None:
    assert len(prompt) > max(window for window in model.geometry.sliding_windows if window)
    for reply in cold_and_cached(model, prompt, PageFormat.BF16, PrefillAttends.FRESH, directory):
        assert_greedy(model, prompt, reply.tokens, BF16_BOUND)
        assert load_tokenizer(MODEL).decode(reply.tokens).startswith(" Paris")


@pytest.mark.slow
def test_nvfp4_replies_from_cold_and_cached_prompts_are_the_same(
    model: WorkerModel, prompt: tuple[int, ...], directory: Path
) -> None:
    cold, cached = cold_and_cached(model, prompt, PageFormat.NVFP4, PrefillAttends.QUANTIZED, directory)
    assert cached.statistics.found.device == len(prompt) // PAGE_SIZE * PAGE_SIZE
    assert_same_reply(model, PageFormat.NVFP4, prompt, cold.tokens, cached.tokens)
    assert load_tokenizer(MODEL).decode(cached.tokens).startswith(" Paris")
