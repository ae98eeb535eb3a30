"""Tiny random models for the tests of the evaluation, in memory and as a directory with a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

MAX_TOKENS = 4096
SLIDING_WINDOW = 24
VOCAB_SIZE = 257
END_TOKEN = 256
HEAD_DIM = 32
NUM_KV_HEADS = 2

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": MAX_TOKENS,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": END_TOKEN,
}


def tiny_llama() -> PreTrainedModel:
    torch.manual_seed(2)
    return LlamaForCausalLM(LlamaConfig(**_SIZES, num_hidden_layers=2)).eval()


def tiny_gemma() -> PreTrainedModel:
    """With a window of 24 tokens in three layers of four."""
    torch.manual_seed(3)
    layer_types = ["sliding_attention"] * 3 + ["full_attention"]
    sizes = {**_SIZES, "layer_types": layer_types, "sliding_window": SLIDING_WINDOW}
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, num_hidden_layers=4)).eval()


def random_text(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE - 1, num_tokens).tolist()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and one that ends a reply; it has no chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def save_tiny_model(directory: Path) -> None:
    tiny_llama().save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
