"""Which models a worker accepts, with what geometry, and why it refuses the others."""

from __future__ import annotations

import pytest
from tiny_models import SLIDING_WINDOW, tiny_model
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from kvtier.errors import InvalidRequestError
from kvtier.worker.geometry import ModelGeometry
from kvtier.worker.model import prepare_model

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def test_geometry_of_accepted_models() -> None:
    assert tiny_model("llama").geometry == ModelGeometry(3, 2, 32, (None,) * 3)
    assert tiny_model("qwen3").geometry == ModelGeometry(3, 2, 32, (None,) * 3)
    assert tiny_model("gemma3").geometry == ModelGeometry(6, 2, 32, (SLIDING_WINDOW,) * 5 + (None,))


def mla() -> PreTrainedModel:
    return DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, moe_intermediate_size=16, n_routed_experts=8))


def attention_sinks() -> PreTrainedModel:
    return GptOssForCausalLM(GptOssConfig(**SIZES, head_dim=16, num_local_experts=2, num_experts_per_tok=1))


def encoder_decoder() -> PreTrainedModel:
    return T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2))


def state_space() -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=1))


def linear_attention() -> PreTrainedModel:
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES, num_experts=2, moe_intermediate_size=16))


def chunked_attention() -> PreTrainedModel:
    return Llama4ForCausalLM(Llama4TextConfig(**SIZES, intermediate_size_mlp=32, num_local_experts=2))


def rope_by_length() -> PreTrainedModel:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope))


def odd_head_dim() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=24))


@pytest.mark.parametrize(
    ("make_model", "reason"),
    [
        (mla, "multi-head latent attention"),
        (attention_sinks, "attention sinks"),
        (encoder_decoder, "encoder-decoder"),
        (state_space, "recurrent or linear-attention layers"),
        (linear_attention, "recurrent or linear-attention layers"),
        (chunked_attention, "chunked_attention"),
        (rope_by_length, "change with the length"),
        (odd_head_dim, "head dimension 24"),
    ],
)
def test_refused_models(make_model, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        prepare_model(make_model(), "refused", "1")


def test_a_window_that_attention_never_hears_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(
        model.module.config, "layer_types", ["sliding_attention"] + ["full_attention"] * 2, raising=False
    )
    with pytest.raises(InvalidRequestError, match="layer 0 of llama has a sliding window"):
        prepare_model(model.module, "refused", "1")
