"""Fixtures of the tests of the replay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from single_thread import one_thread
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["one_thread"]


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a context of 512 tokens, as a Hugging Face directory."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory
