"""Small random models with heads that the kernels take, and sequences that join and leave while others decode."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvtier.ops import DecodeTables, FixedDecode
from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import PLAIN, Recipe, RecipeName
from kvtier.worker import OpenPage, PrefillAttends, WorkerModel, prepare_model
from kvtier.worker.batch import PagedKv
from kvtier.worker.chunk import Chunk
from kvtier.worker.open_pages import OpenPageStore
from kvtier.worker.step import StepOutput, StepRunner

PAGE_SIZE = 16
VOCAB_SIZE = 199
NUM_SLOTS = 6
NUM_STEPS = 200
CPU = torch.device("cpu")

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@functools.cache
def small_model(architecture: str, device: torch.device, dtype: torch.dtype) -> WorkerModel:
    """The same weights for every device and dtype.

    `wide` has heads of 128; `gemma3` has a window of 40 tokens in two layers of three.
    """
    torch.manual_seed(1)
    module: PreTrainedModel
    if architecture == "llama":
        module = LlamaForCausalLM(LlamaConfig(**_SIZES, num_hidden_layers=3))
    elif architecture == "wide":
        module = LlamaForCausalLM(LlamaConfig(**{**_SIZES, "head_dim": 128}, num_hidden_layers=3))
    else:
        layer_types = ["sliding_attention"] * 2 + ["full_attention"]
        module = Gemma3ForCausalLM(
            Gemma3TextConfig(**_SIZES, num_hidden_layers=3, layer_types=layer_types, sliding_window=40)
        )
    return prepare_model(module.to(device, dtype), f"small {architecture}", "1")


def recipe_for(model: WorkerModel, name: RecipeName) -> Recipe:
    """A recipe of this name with random transforms."""
    if name is RecipeName.PLAIN:
        return PLAIN
    num_layers, num_kv_heads, head_dim, _ = model.geometry
    random = np.random.default_rng(7)
    spread = np.exp(random.uniform(-0.6, 0.6, (num_layers, num_kv_heads, head_dim)))
    if name is RecipeName.BALANCED:
        return Recipe(name, balance=spread.astype(np.float32))
    rotations, _ = np.linalg.qr(random.normal(size=(*spread.shape, head_dim)))
    keys = rotations * spread[..., None, :]
    return Recipe(name, key_matrices=keys.astype(np.float16))


def random_tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, count).tolist()


class NeverCaptured(FixedDecode):
    """Decodes of which no graph is captured."""

    def __init__(self, tables: DecodeTables) -> None:
        super().__init__(tables)
        self.is_capturable = False


class UncapturedRunner(StepRunner):
    """Runs the decode batches that a `StepRunner` would capture, kernel by kernel."""

    def run(self, chunks: Sequence[Chunk]) -> StepOutput:
        output = super().run(chunks)
        self._uses_graphs = True  # although the batch before was not captured
        return output


def make_runner(
    model: WorkerModel,
    page_format: PageFormat,
    open_page: OpenPage = OpenPage.BF16,
    recipe: Recipe = PLAIN,
    attends: PrefillAttends = PrefillAttends.FRESH,
    uses_graphs: bool = True,
    is_captured: bool = True,
) -> StepRunner:
    """A pool of the runner's own, where the model is."""
    layout = model.identity(page_format, PAGE_SIZE).layout
    memory = torch.zeros(256, layout.page_bytes, dtype=torch.uint8, device=model.device)
    pages = PagedKv.of(memory, layout, recipe, model.dtype)
    open_pages = OpenPageStore(layout, open_page, NUM_SLOTS, model.device)
    if not is_captured:
        return UncapturedRunner(model, pages, open_pages, attends, make_decode=NeverCaptured)
    return StepRunner(model, pages, open_pages, attends, uses_graphs)


class Life(NamedTuple):
    """A sequence that is prefilled in step `joins`, decodes from the next one on, and is gone from step `leaves` on."""

    slot: int
    prompt_tokens: int
    joins: int
    leaves: int


LIVES = (
    Life(0, 30, 0, 120),
    Life(2, 100, 0, NUM_STEPS),
    Life(1, 1, 5, 60),
    Life(5, 47, 40, 90),
    Life(1, 16, 70, NUM_STEPS),
    Life(0, 64, 130, NUM_STEPS),
)


def scripted_steps(lives: Sequence[Life] = LIVES) -> Iterator[list[Chunk]]:
    """The chunks of every step; what a sequence says does not depend on what was computed."""
    tokens = {life: random_tokens(life.prompt_tokens + NUM_STEPS, seed) for seed, life in enumerate(lives)}
    pages = {life: list(range(24 * index, 24 * (index + 1)))[::-1] for index, life in enumerate(lives)}
    for step in range(NUM_STEPS):
        decodes, prefills = [], []
        for life in lives:
            if step == life.joins:
                prefills.append(Chunk(tokens[life][: life.prompt_tokens], 0, pages[life], life.slot))
            elif life.joins < step < life.leaves:
                start = life.prompt_tokens + step - life.joins - 1
                decodes.append(Chunk(tokens[life][start : start + 1], start, pages[life], life.slot))
        yield [*decodes, *prefills]


def steps_with_a_long_prompt() -> Iterator[list[Chunk]]:
    """The first steps, with a prompt of three pieces beside the decodes, and its first decodes."""
    tokens, pages = random_tokens(153, seed=9), list(range(200, 212))
    cuts = {1: (0, 50), 2: (50, 83), 3: (83, 150), 4: (150, 151), 5: (151, 152), 6: (152, 153)}
    for step, chunks in zip(range(7), scripted_steps(), strict=False):
        if step in cuts:
            start, end = cuts[step]
            chunks = [*chunks, Chunk(tokens[start:end], start, pages, 4)]
        yield sorted(chunks, key=lambda chunk: not chunk.is_decode)


def run_script(runner: StepRunner, steps: Iterable[list[Chunk]] | None = None) -> torch.Tensor:
    """Logits `(chunks of all steps, vocabulary)` in fp32 on the host."""
    rows = []
    for chunks in steps or scripted_steps():
        output = runner.run(chunks)
        rows.append(output.logits[output.rows].float().cpu())
    return torch.cat(rows)


def generate(runner: StepRunner, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """A greedy reply."""
    pages = list(range(-(-(len(prompt) + num_tokens) // PAGE_SIZE)))
    tokens = list(prompt)
    chunk = Chunk(prompt, 0, pages, 0)
    for _ in range(num_tokens):
        output = runner.run([chunk])
        tokens.append(int(output.likeliest[output.rows[0]]))
        chunk = Chunk(tokens[-1:], len(tokens) - 1, pages, 0)
    return tokens[len(prompt) :]


def choose_behind(runner: StepRunner, prompt: Sequence[int], reply: Sequence[int]) -> list[int]:
    """What would follow the prompt, and each token of `reply` but the last, whatever was chosen before."""
    pages = list(range(-(-(len(prompt) + len(reply)) // PAGE_SIZE)))
    chunks = [Chunk(prompt, 0, pages, 0)]
    chunks += [Chunk([token], len(prompt) + index, pages, 0) for index, token in enumerate(reply[:-1])]
    outputs = (runner.run([chunk]) for chunk in chunks)
    return [int(output.likeliest[output.rows[0]]) for output in outputs]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def share_of_equal_tokens(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.argmax(-1) == expected.argmax(-1)).float().mean())
