"""Tiny random models of three architectures for the tests of the worker.

Their weights are larger than usual at initialisation, so that logits are far enough apart for greedy tokens to be
compared. `gemma3` has a window of 24 tokens in five layers of six.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvtier.worker.attention import ATTENTION_NAME
from kvtier.worker.model import WorkerModel, prepare_model

ARCHITECTURES = ("llama", "qwen3", "gemma3")
PAGE_SIZE = 16
VOCAB_SIZE = 199
MAX_TOKENS = 512
SLIDING_WINDOW = 24

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_TOKENS,
    "initializer_range": 0.15,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@functools.cache
def tiny_model(architecture: str) -> WorkerModel:
    """The same model in every test and every run; in fp32."""
    torch.manual_seed(1)
    module: PreTrainedModel
    match architecture:
        case "llama":
            module = LlamaForCausalLM(LlamaConfig(**_SIZES, num_hidden_layers=3))
        case "qwen3":
            module = Qwen3ForCausalLM(Qwen3Config(**_SIZES, num_hidden_layers=3))
        case _:
            layer_types = ["sliding_attention"] * 5 + ["full_attention"]
            config = Gemma3TextConfig(
                **_SIZES, num_hidden_layers=6, layer_types=layer_types, sliding_window=SLIDING_WINDOW
            )
            module = Gemma3ForCausalLM(config)
    return prepare_model(module, f"tiny {architecture}", "1")


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, count).tolist()


def plain_logits(model: WorkerModel, tokens: list[int]) -> torch.Tensor:
    """Logits `(tokens, vocabulary)` of transformers' own attention, without a cache."""
    model.module.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = model.module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    model.module.set_attn_implementation(ATTENTION_NAME)
    return logits
