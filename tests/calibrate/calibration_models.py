"""Tiny random models whose rotary embeddings differ in what matters to the calibration, and texts for them."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CohereConfig,
    Gemma3TextConfig,
    LlamaConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SmolLM3Config,
)

from kvtier.calibrate import Texts
from kvtier.worker import WorkerModel, prepare_model
from kvtier.worker.attention import LayerCall

MAX_TOKENS = 512
VOCAB_SIZE = 257  # bytes, and the token that begins a text
BEGIN = 256
HEAD_DIM = 32

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": MAX_TOKENS,
    "initializer_range": 0.15,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _configuration(architecture: str) -> PreTrainedConfig:
    match architecture:
        case "llama":
            return LlamaConfig(**_SIZES)
        case "llama of head dimension 48":
            return LlamaConfig(**{**_SIZES, "head_dim": 48})
        case "yarn":  # cosines and sines have a factor
            rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
            return LlamaConfig(**_SIZES, rope_parameters=rope)
        case "qwen2":  # biases of queries and keys
            return Qwen2Config(**{**_SIZES, "hidden_size": 4 * HEAD_DIM})
        case "gemma3":  # two frequencies by layer, and norms of queries and keys
            types = ["sliding_attention", "full_attention"]
            return Gemma3TextConfig(**_SIZES, layer_types=types, sliding_window=24)
        case "phi":  # half of the channels are turned
            return PhiConfig(**{**_SIZES, "hidden_size": 4 * HEAD_DIM}, partial_rotary_factor=0.5)
        case "smollm3":  # the second layer has no rotary embedding
            return SmolLM3Config(**{**_SIZES, "hidden_size": 4 * HEAD_DIM}, no_rope_layers=[1, 0])
        case "cohere":  # channels are turned with their neighbours
            return CohereConfig(**{**_SIZES, "hidden_size": 4 * HEAD_DIM})
        case _:
            raise ValueError(architecture)


@functools.cache
def small_model(architecture: str) -> WorkerModel:
    """The same model in every test and every run; in fp32."""
    torch.manual_seed(1)
    module = AutoModelForCausalLM.from_config(_configuration(architecture))
    generator = torch.Generator().manual_seed(2)
    for name, parameter in module.named_parameters():
        if name.endswith(("q_proj.bias", "k_proj.bias")):
            parameter.data = 5 * torch.randn(parameter.shape, generator=generator)
    return prepare_model(module, architecture, f"revision of {architecture}")


def random_texts(num_windows: int = 3, window_tokens: int = 64) -> Texts:
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, (num_windows, window_tokens)).tolist()
    return Texts(tuple(map(tuple, tokens)), "digest of random tokens")


class SeenCalls:
    """An attention batch that keeps what the layers ask for; every token attends to itself alone."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []

    def attend(self, call: LayerCall) -> torch.Tensor:
        self.calls.append(call)
        return call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], dim=1)


def seen_calls(model: WorkerModel, tokens: tuple[int, ...], first_position: int = 0) -> list[LayerCall]:
    """What the layers ask for when `tokens` stand at `first_position` and following."""
    seen = SeenCalls()
    positions = torch.arange(first_position, first_position + len(tokens)).unsqueeze(0)
    with torch.inference_mode():
        model.module(input_ids=torch.tensor([tokens]), position_ids=positions, use_cache=False, kvtier_batch=seen)
    return seen.calls


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte of a text, behind a token that begins it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)} | {"<begin>": BEGIN}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", BEGIN)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<begin>")


def save_model(architecture: str, directory: Path) -> Path:
    """A model directory as users have it."""
    small_model(architecture).module.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    assert AutoConfig.from_pretrained(directory).vocab_size == VOCAB_SIZE
    return directory
