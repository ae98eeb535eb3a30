"""What a model's files and settings make of the fingerprint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from random_recipes import random_recipe
from tiny_models import plain_logits, random_tokens, tiny_model
from transformers import LlamaForCausalLM

from kvtier.errors import InvalidRequestError
from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import PLAIN, SEARCH, Origin, Recipe, RecipeName
from kvtier.worker.identity import weights_digest
from kvtier.worker.model import load_model
from kvtier.worker.options import OpenPage, PrefillAttends

CALIBRATED = [name for name in RecipeName if name.is_calibrated]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tiny_model("llama").module.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_saved_model_loads_and_computes_the_same(directory: Path) -> None:
    model = load_model(directory)
    assert isinstance(model.module, LlamaForCausalLM)
    assert model.name == "tiny"
    assert model.geometry == tiny_model("llama").geometry
    assert model.revision == weights_digest(directory)
    tokens = random_tokens(8)
    assert torch.equal(plain_logits(model, tokens), plain_logits(tiny_model("llama"), tokens))


def test_pages_of_four_bits_have_a_recipe_by_default(directory: Path) -> None:
    model = load_model(directory)
    recipes = {page_format: model.default_recipe(page_format) for page_format in PageFormat}
    assert recipes == {PageFormat.NVFP4: SEARCH, PageFormat.FP8: PLAIN, PageFormat.BF16: PLAIN}


def test_the_digest_follows_weights_and_configuration(directory: Path) -> None:
    digest = weights_digest(directory)
    assert digest == weights_digest(directory)
    config = directory / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    changed = weights_digest(directory)
    assert changed != digest
    with (directory / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, 2)
        weights.write(b"\x55")
    changed_again = weights_digest(directory)
    assert changed_again not in (digest, changed)
    (directory / "README.md").write_text("not a part of the model")
    assert weights_digest(directory) == changed_again


def test_everything_that_changes_stored_values_changes_the_fingerprint(directory: Path) -> None:
    fp32, bf16 = load_model(directory), load_model(directory, dtype=torch.bfloat16)
    identities = [
        fp32.identity(PageFormat.NVFP4),
        fp32.identity(PageFormat.FP8),
        fp32.identity(PageFormat.NVFP4, page_size=32),
        fp32.identity(PageFormat.NVFP4, prefill_attends=PrefillAttends.QUANTIZED),
        *(fp32.identity(PageFormat.NVFP4, open_page=open_page) for open_page in (OpenPage.FP8, OpenPage.OFF)),
        fp32.identity(PageFormat.NVFP4, recipe=PLAIN),
        *(fp32.identity(PageFormat.NVFP4, recipe=random_recipe(name, fp32)) for name in CALIBRATED),
        bf16.identity(PageFormat.NVFP4),
        load_model(directory, revision="another").identity(PageFormat.NVFP4),
        tiny_model("qwen3").identity(PageFormat.NVFP4),
    ]
    assert len({identity.fingerprint for identity in identities}) == len(identities)
    assert load_model(directory).identity(PageFormat.NVFP4).fingerprint == identities[0].fingerprint
    assert identities[0].rope == '{"rope_theta":10000.0,"rope_type":"default"}'


def test_the_recipe_of_another_model_is_refused(directory: Path) -> None:
    model = load_model(directory)
    for name in CALIBRATED:
        with pytest.raises(InvalidRequestError, match="tiny has layers, KV heads and head dimension"):
            model.identity(PageFormat.NVFP4, recipe=random_recipe(name, tiny_model("gemma3")))
    balance = random_recipe(RecipeName.BALANCED, model).balance
    own, other = (
        Recipe(RecipeName.BALANCED, balance=balance, origin=Origin("tiny", revision))
        for revision in (model.revision, "another")
    )
    assert own.digest in model.identity(PageFormat.NVFP4, recipe=own).recipe
    with pytest.raises(InvalidRequestError, match="run `kvtier calibrate` for this model"):
        model.identity(PageFormat.NVFP4, recipe=other)


def test_a_place_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"no model at .*config\.json"):
        load_model(tmp_path)
    with pytest.raises(InvalidRequestError, match="no model"):
        load_model(tmp_path / "nowhere")
