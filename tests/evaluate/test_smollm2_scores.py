"""Scores of a real model, SmolLM2 135M Instruct, against plain transformers with quantisation simulated in numpy."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from quantised_attention import (
    Storage,
    fp8,
    kullback_leibler,
    losses,
    nvfp4,
    nvfp4_searched,
    plain_logits,
    quantised_logits,
)

from kvtier.evaluate.configurations import Configuration
from kvtier.evaluate.scoring import score_texts
from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import PLAIN, Recipe, RecipeName
from kvtier.worker import OpenPage, load_model, load_tokenizer

MODEL = Path(__file__).parents[2] / "models" / "smollm2-135m-instruct"
PAGE_SIZE = 64
CONTEXT, NUM_TOKENS = 32, 192


def balanced_recipe() -> Recipe:
    """Powers of two, so that dividing by them has one result."""
    factors = 2.0 ** np.random.default_rng(0).integers(-1, 2, (30, 3, 64))
    return Recipe(RecipeName.BALANCED, balance=factors.astype(np.float32))


CASES = {
    "fp8": (PageFormat.FP8, PLAIN, OpenPage.OFF, fp8),
    "plain": (PageFormat.NVFP4, PLAIN, OpenPage.OFF, nvfp4),
    "plain, open page": (PageFormat.NVFP4, PLAIN, OpenPage.BF16, nvfp4),
    "balanced, open page": (PageFormat.NVFP4, balanced_recipe(), OpenPage.BF16, nvfp4_searched),
}


@pytest.mark.slow
def test_mean_divergence_is_that_of_a_simulation() -> None:
    """In fp64: in fp32 the order of sums decides how a value in thousands is rounded, which changes all that follows,
    so that two computations of the same lie some percent apart over so few positions."""
    model = load_model(MODEL)
    model.module.double()
    text = files("kvtier.evaluate").joinpath("texts/evaluation.txt").read_text("utf-8")
    tokens = load_tokenizer(MODEL)(text, verbose=False)["input_ids"][: CONTEXT + NUM_TOKENS + 1]
    configurations = [
        Configuration(page_format, name, recipe, open_page)
        for name, (page_format, recipe, open_page, _) in CASES.items()
    ]
    (scores,) = score_texts(model, configurations, [tokens], [CONTEXT], NUM_TOKENS, PAGE_SIZE, lambda _: None)

    exact = plain_logits(model.module, tokens)[CONTEXT:-1]
    for configuration, of_pages in zip(configurations, scores.configurations, strict=True):
        quantise = CASES[configuration.recipe_label][-1]
        is_open = configuration.open_page is OpenPage.BF16
        storage = Storage(quantise, is_open, PAGE_SIZE, configuration.recipe.balance)
        simulated = quantised_logits(model.module, tokens, storage)[CONTEXT:-1]
        np.testing.assert_allclose(of_pages.exact_loss, losses(exact, tokens[CONTEXT + 1 :]), atol=1e-3)
        assert of_pages.divergence.mean() == pytest.approx(kullback_leibler(exact, simulated).mean(), rel=0.02)
