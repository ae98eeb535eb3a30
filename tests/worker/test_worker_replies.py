"""Replies of a worker on a real daemon are the model's own, whatever is cached and however requests are batched."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from random_recipes import random_recipe
from scratch_pool import BF16_BOUND, assert_greedy, assert_same_reply
from tiny_models import ARCHITECTURES, PAGE_SIZE, random_tokens, tiny_model
from transformers import PreTrainedModel
from worker_fixtures import StartWorker

from kvtier.client import CommitResult, Lease
from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import Recipe, RecipeName
from kvtier.worker import FinishReason, OpenPage, PrefillAttends, Request, Sampling, Worker
from kvtier.worker.attention import ATTENTION_NAME

QUANTIZED = PrefillAttends.QUANTIZED
PLAIN, SEARCH, BALANCED, FULL = RecipeName


def generate_plainly(module: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers generate greedily by themselves."""
    module.set_attn_implementation("eager")
    tokens = torch.tensor([prompt])
    generated = module.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=num_tokens, do_sample=False
    )
    module.set_attn_implementation(ATTENTION_NAME)
    return generated[0, len(prompt) :].tolist()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bf16_replies_are_those_of_transformers(start_worker: StartWorker, architecture: str) -> None:
    model = tiny_model(architecture)
    worker = start_worker(architecture)
    for seed, num_tokens in enumerate((90, 16, 33)):
        prompt = random_tokens(num_tokens, seed)
        reply = worker.generate(Request("plain", prompt, 40))
        assert reply.finish_reason is FinishReason.LENGTH
        assert_greedy(model, prompt, reply.tokens, BF16_BOUND)
        again = worker.generate(Request("plain", prompt, 40))
        assert again.statistics.found.device == num_tokens // PAGE_SIZE * PAGE_SIZE
        assert_greedy(model, prompt, again.tokens, BF16_BOUND)
    prompt = random_tokens(50, seed=9)  # whose top two logits lie further apart than the bound at every step
    assert list(worker.generate(Request("plain", prompt, 12)).tokens) == generate_plainly(model.module, prompt, 12)


@pytest.mark.parametrize(
    ("architecture", "page_format", "name", "open_page"),
    [
        *(
            (architecture, page_format, PLAIN, OpenPage.BF16)
            for architecture in ARCHITECTURES
            for page_format in PageFormat
        ),
        ("llama", PageFormat.NVFP4, PLAIN, OpenPage.OFF),
        ("qwen3", PageFormat.NVFP4, SEARCH, OpenPage.FP8),
        ("qwen3", PageFormat.NVFP4, BALANCED, OpenPage.BF16),
        ("llama", PageFormat.FP8, BALANCED, OpenPage.FP8),
        ("gemma3", PageFormat.NVFP4, FULL, OpenPage.BF16),
        ("qwen3", PageFormat.BF16, FULL, OpenPage.OFF),
    ],
)
def test_cold_and_cached_prompts_get_the_same_reply(
    start_worker: StartWorker, architecture: str, page_format: PageFormat, name: RecipeName, open_page: OpenPage
) -> None:
    """Where a prefill sees what decodes see, at page multiples and between them."""
    recipe = random_recipe(name, tiny_model(architecture))
    worker = start_worker(architecture, page_format, QUANTIZED, recipe=recipe, open_page=open_page)
    for num_tokens in (15, 16, 17, 64, 75):
        request = Request("cached", random_tokens(num_tokens, seed=num_tokens), 24)
        cold, cached = worker.generate(request), worker.generate(request)
        assert (cold.statistics.found.total, cold.statistics.computed_tokens) == (0, num_tokens)
        whole_pages = num_tokens // PAGE_SIZE * PAGE_SIZE
        assert cached.statistics.found == (whole_pages, 0, 0)
        assert cached.statistics.computed_tokens == max(1, num_tokens - whole_pages)
        replies = cold.tokens, cached.tokens
        assert_same_reply(tiny_model(architecture), page_format, request.prompt, *replies, open_page, recipe)


@pytest.mark.parametrize("page_format", PageFormat)
def test_cached_replies_repeat_exactly(start_worker: StartWorker, page_format: PageFormat) -> None:
    """With fresh prefill too: the same pages give the same tokens, run after run."""
    worker = start_worker("qwen3", page_format)
    request = Request("repeat", random_tokens(77), 30)
    worker.generate(request)
    assert len({worker.generate(request).tokens for _ in range(3)}) == 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_conversation_extends_its_own_pages(start_worker: StartWorker, architecture: str) -> None:
    """Each turn finds every whole page that the turns before it computed, replies included."""
    worker = start_worker(architecture)
    prompt = random_tokens(40)
    for turn in range(4):
        reply = worker.generate(Request("turns", prompt, 21))
        computed_before = 0 if turn == 0 else len(prompt) - 8  # the last token of a reply is not computed
        assert reply.statistics.found.device == computed_before // PAGE_SIZE * PAGE_SIZE
        assert_greedy(tiny_model(architecture), prompt, reply.tokens, BF16_BOUND)
        prompt = [*prompt, *reply.tokens, *random_tokens(7, seed=turn)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_together_or_one_at_a_time(start_worker: StartWorker, architecture: str) -> None:
    """More requests than run at once, of many lengths; some share a prefix."""
    model = tiny_model(architecture)
    lengths = (5, 90, 16, 1, 60, 33, 47)
    prompts = [random_tokens(length, seed=length) for length in lengths]
    prompts.append([*prompts[1][:50], *random_tokens(20, seed=3)])

    def requests(tenant: str) -> list[Request]:
        return [Request(tenant, prompt, 10 + index * 3) for index, prompt in enumerate(prompts)]

    worker = start_worker(architecture, PageFormat.NVFP4, QUANTIZED, max_sequences=4, step_tokens=48)
    together = worker.run(requests("together"))
    alone = [worker.generate(request) for request in requests("alone")]
    for prompt, one, other in zip(prompts, together, alone, strict=True):
        assert one.error is None
        assert_same_reply(model, PageFormat.NVFP4, prompt, one.tokens, other.tokens)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_prompt_in_chunks_gets_the_same_reply(start_worker: StartWorker, architecture: str) -> None:
    model, prompt = tiny_model(architecture), random_tokens(150)
    replies = [
        start_worker(architecture, PageFormat.NVFP4, QUANTIZED, step_tokens=step_tokens)
        .generate(Request(f"chunks-of-{step_tokens}", prompt, 20))
        .tokens
        for step_tokens in (512, 64, 37, 9)
    ]
    for reply in replies[1:]:
        assert_same_reply(model, PageFormat.NVFP4, prompt, replies[0], reply)


def test_others_decode_while_a_long_prompt_is_computed(start_worker: StartWorker) -> None:
    worker = start_worker(step_tokens=32)
    short = worker.submit(Request("overlap", random_tokens(10), 30))
    worker.step()
    assert len(short.generated) == 1
    long = worker.submit(Request("overlap", random_tokens(31 * 4, seed=1), 5))
    for step in range(1, 5):
        assert not long.generated
        worker.step()
        assert len(short.generated) == 1 + step
    assert len(long.generated) == 1


def test_a_stop_token_ends_the_reply(start_worker: StartWorker) -> None:
    worker = start_worker()
    prompt = random_tokens(20)
    whole = worker.generate(Request("stop", prompt, 10)).tokens
    stop = whole[4]
    stopped = worker.generate(Request("stop", prompt, 10, frozenset({stop})))
    assert stopped.tokens == whole[: whole.index(stop) + 1]
    assert stopped.finish_reason is FinishReason.STOP


def test_pages_are_shared_up_to_where_extra_keys_differ(start_worker: StartWorker) -> None:
    worker = start_worker()

    def found(tenant: str, *extra_keys: tuple[int, bytes]) -> int:
        request = Request(tenant, random_tokens(4 * PAGE_SIZE), 2 * PAGE_SIZE, extra_keys=extra_keys)
        return worker.generate(request).statistics.found.total

    assert found("extras") == 0
    assert found("extras") == 4 * PAGE_SIZE
    assert found("extras", (PAGE_SIZE + 3, b"image")) == PAGE_SIZE
    assert found("extras", (PAGE_SIZE + 3, b"image")) == 4 * PAGE_SIZE
    assert found("extras", (0, b"adapter")) == 0
    assert found("another") == 0


def test_pages_of_one_recipe_are_not_read_under_another(start_worker: StartWorker) -> None:
    """Workers on one daemon, of one model and tenant, that differ in the recipe or the open page alone."""
    model, request = tiny_model("llama"), Request("recipes", random_tokens(70), 4)
    recipes = [random_recipe(name, model) for name in RecipeName]
    scaled = Recipe(PLAIN, global_scales=np.full((model.geometry.num_layers, 2), 2, dtype=np.float32))
    workers = [start_worker("llama", PageFormat.NVFP4, recipe=recipe) for recipe in (*recipes, scaled)]
    workers += [start_worker("llama", PageFormat.NVFP4, open_page=kept) for kept in (OpenPage.FP8, OpenPage.OFF)]
    assert [worker.generate(request).statistics.found.total for worker in workers] == [0] * len(workers)
    assert [worker.generate(request).statistics.found.total for worker in workers] == [64] * len(workers)


def test_sequences_that_end_leave_room_for_open_pages(start_worker: StartWorker) -> None:
    """Finished or cancelled, running or waiting: the room for two open pages serves any number of requests."""
    worker = start_worker("llama", PageFormat.NVFP4, QUANTIZED, max_sequences=2)
    request = Request("room", random_tokens(20), 3)
    expected = worker.generate(request).tokens
    for _ in range(4):
        cancelled = [worker.submit(Request("room", random_tokens(30 + seed, seed), 9)) for seed in range(3)]
        worker.step()
        assert [len(sequence.generated) for sequence in cancelled] == [1, 1, 0]
        for sequence in cancelled:
            worker.cancel(sequence)
        replies = worker.run([request] * 3)
        assert [reply.tokens for reply in replies] == [expected] * 3


def test_an_interrupted_pass_is_not_continued(start_worker: StartWorker) -> None:
    """What it left of the open page and the pages is computed anew, and the reply is what it would have been."""
    model = tiny_model("llama")
    worker = start_worker("llama", PageFormat.NVFP4, QUANTIZED, step_tokens=41)
    expected = worker.generate(Request("whole", random_tokens(100), 20)).tokens
    sequence = worker.submit(Request("interrupted", random_tokens(100), 20))
    worker.step()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), model.module.model.layers[-1].register_forward_pre_hook(interrupt):
        worker.step()
    while sequence.reply is None:
        worker.step()
    assert sequence.reply.statistics.restarts == 1
    assert_same_reply(model, PageFormat.NVFP4, sequence.request.prompt, sequence.reply.tokens, expected)
    cached = worker.generate(sequence.request)
    assert cached.statistics.found.device == 6 * PAGE_SIZE
    assert_same_reply(model, PageFormat.NVFP4, sequence.request.prompt, cached.tokens, expected)


def test_an_interrupted_commit_leaves_no_pass_to_repeat(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of the sequence that commits nor of one behind it, whose pass has written over its open page."""
    model = tiny_model("llama")
    worker = start_worker("llama", step_tokens=40)
    short, long = Request("commits", random_tokens(30, 1), 3), Request("commits", random_tokens(100, 2), 20)
    expected = worker.run([short, long])
    first = worker.submit(dataclasses.replace(short, namespace="interrupted"))
    worker.step()
    second = worker.submit(dataclasses.replace(long, namespace="interrupted"))
    commit = Lease.commit

    def interrupt_once(lease: Lease, *args: Any) -> CommitResult:
        result = commit(lease, *args)
        if lease is first.lease and second.num_computed % PAGE_SIZE:
            monkeypatch.undo()
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Lease, "commit", interrupt_once)
    with pytest.raises(KeyboardInterrupt):
        while first.reply is None or second.reply is None:
            worker.step()
    while first.reply is None or second.reply is None:
        worker.step()
    for request, reply, same in zip((short, long), (first.reply, second.reply), expected, strict=True):
        assert reply.finish_reason is FinishReason.LENGTH
        assert reply.statistics.restarts == 1
        assert_same_reply(model, PageFormat.BF16, request.prompt, reply.tokens, same.tokens)
    whole, interrupted = (_cached_values(worker, request) for request in (long, second.request))
    assert interrupted.shape == (6, *whole.shape[1:])
    torch.testing.assert_close(interrupted, whole, rtol=0, atol=0.05)


def _cached_values(worker: Worker, request: Request) -> torch.Tensor:
    """What the pages of a prompt hold in the cache, `(pages, values)`, of pages in BF16."""
    lease = worker._session.acquire(request.namespace, np.array(request.prompt, dtype="<u4"))
    pages = torch.from_numpy(worker._session.pool.memory[lease.matched_pages])
    lease.release()
    return pages.flatten(1).view(torch.bfloat16).float()


def test_sampling_follows_its_seed(start_worker: StartWorker) -> None:
    worker = start_worker("llama", PageFormat.BF16, QUANTIZED)
    prompt = random_tokens(20)

    def sample(seed: int, beside: int) -> tuple[int, ...]:
        sampling = Sampling(temperature=1.0, top_p=0.9, seed=seed)
        requests = [Request("sample", prompt, 24, sampling=sampling)]
        requests += [Request("sample", random_tokens(9, seed=other), 24) for other in range(beside)]
        return worker.run(requests)[0].tokens

    assert sample(1, beside=0) == sample(1, beside=0) == sample(1, beside=2)
    assert len({sample(seed, beside=0) for seed in range(5)}) == 5
