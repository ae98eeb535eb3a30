"""Scores against plain transformers with quantisation simulated in numpy (`quantised_attention`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from evaluation_models import HEAD_DIM, NUM_KV_HEADS, random_text, tiny_gemma, tiny_llama
from quantised_attention import (
    Quantise,
    Storage,
    bf16,
    fp8,
    kullback_leibler,
    losses,
    nvfp4,
    nvfp4_searched,
    plain_logits,
    quantised_logits,
)
from transformers import PreTrainedModel

from kvtier.errors import InvalidRequestError
from kvtier.evaluate.configurations import Configuration
from kvtier.evaluate.divergence import PositionScores, compare, concatenate
from kvtier.evaluate.scoring import Span, check_contexts, plan_spans, score_texts
from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import PLAIN, Recipe, RecipeName
from kvtier.worker import OpenPage, prepare_model

PAGE_SIZE = 16
CONTEXTS = (0, 90)
NUM_TOKENS = 40


class Case(NamedTuple):
    """A format and a recipe, and what they give back by the simulation."""

    page_format: PageFormat
    recipe_name: RecipeName
    quantise: Quantise


CASES = {
    "bf16": Case(PageFormat.BF16, RecipeName.PLAIN, bf16),
    "fp8": Case(PageFormat.FP8, RecipeName.PLAIN, fp8),
    "plain": Case(PageFormat.NVFP4, RecipeName.PLAIN, nvfp4),
    "search": Case(PageFormat.NVFP4, RecipeName.SEARCH, nvfp4_searched),
    "balanced": Case(PageFormat.NVFP4, RecipeName.BALANCED, nvfp4_searched),
}


def recipe_of(case: Case, num_layers: int) -> Recipe:
    if case.recipe_name is not RecipeName.BALANCED:
        return Recipe(case.recipe_name)
    # Powers of two, so that dividing by them has one result.
    factors = 2.0 ** np.random.default_rng(5).integers(-1, 2, (num_layers, NUM_KV_HEADS, HEAD_DIM))
    return Recipe(RecipeName.BALANCED, balance=factors.astype(np.float32))


@pytest.mark.parametrize("open_page", [OpenPage.BF16, OpenPage.OFF])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma])
def test_scores_are_those_of_a_simulation(make: Callable[[], PreTrainedModel], case: Case, open_page: OpenPage) -> None:
    # In fp64, since in fp32 the order of a sum decides how some values are rounded, and one of those changes all that
    # follows.
    module = make().double()
    recipe = recipe_of(case, module.config.num_hidden_layers)
    texts = [random_text(max(CONTEXTS) + NUM_TOKENS + 1, seed) for seed in (0, 1)]
    storage = Storage(case.quantise, open_page is OpenPage.BF16, PAGE_SIZE, recipe.balance)
    exact = [plain_logits(module, text) for text in texts]
    simulated = [quantised_logits(module, text, storage) for text in texts]

    configuration = Configuration(case.page_format, "a recipe", recipe, open_page)
    computed: list[int] = []
    scores = score_texts(
        prepare_model(module, "tiny", "1"), [configuration], texts, CONTEXTS, NUM_TOKENS, PAGE_SIZE, computed.append
    )

    assert sum(computed) == 2 * 2 * (max(CONTEXTS) + NUM_TOKENS)  # two texts, as they are and through pages
    for context, (measured,), lengths in scores:
        assert lengths == [NUM_TOKENS, NUM_TOKENS]
        rows = slice(context, context + NUM_TOKENS)
        expected = [
            expected_scores(own_exact[rows], own_simulated[rows], text[context + 1 : context + NUM_TOKENS + 1])
            for text, own_exact, own_simulated in zip(texts, exact, simulated, strict=True)
        ]
        assert_alike(measured, concatenate(expected))
    assert [of_context.context for of_context in scores] == list(CONTEXTS)


def expected_scores(exact: np.ndarray, simulated: np.ndarray, following: list[int]) -> PositionScores:
    return PositionScores(
        losses(simulated, following),
        losses(exact, following),
        kullback_leibler(exact, simulated),
        (exact.argmax(-1) == simulated.argmax(-1)).astype(np.float64),
    )


def assert_alike(measured: PositionScores, expected: PositionScores) -> None:
    np.testing.assert_allclose(measured.loss, expected.loss, atol=1e-4)
    np.testing.assert_allclose(measured.exact_loss, expected.exact_loss, atol=1e-4)
    np.testing.assert_allclose(measured.divergence, expected.divergence, atol=1e-5, rtol=1e-3)
    assert np.mean(measured.agrees == expected.agrees) > 0.98


def test_what_is_stored_less_exactly_diverges_more() -> None:
    """And the model as it is does not diverge from itself, or the scores would be of something else."""
    module = tiny_llama()
    text = random_text(max(CONTEXTS) + NUM_TOKENS + 1)
    configurations = [
        Configuration(page_format, "plain", PLAIN, OpenPage.OFF)
        for page_format in (PageFormat.BF16, PageFormat.FP8, PageFormat.NVFP4)
    ]
    model = prepare_model(module, "tiny", "1")
    for _, by_configuration, _ in score_texts(
        model, configurations, [text], CONTEXTS, NUM_TOKENS, PAGE_SIZE, lambda _: None
    ):
        bf16_kl, fp8_kl, nvfp4_kl = (scores.divergence.mean() for scores in by_configuration)
        assert 0 <= bf16_kl < fp8_kl / 50
        assert fp8_kl < nvfp4_kl / 3


def test_spans_are_measured_whole_or_not_at_all() -> None:
    assert plan_spans([0, 90], 40, 32) == [
        Span(0, 32, 0),
        Span(32, 40, 0),
        Span(40, 64, None),
        Span(64, 90, None),
        Span(90, 96, 90),
        Span(96, 128, 90),
        Span(128, 130, 90),
    ]


def test_contexts_whose_positions_overlap_are_refused() -> None:
    check_contexts([6144, 0], 6144)
    with pytest.raises(InvalidRequestError, match="behind 0 and 1000 tokens of context overlap"):
        check_contexts([1000, 0], 1024)


def test_divergence_of_known_distributions() -> None:
    """KL of (1/2, 1/4, 1/4) from (1/4, 1/4, 1/2) is ln(2) / 4; logits may be shifted."""
    exact = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.25, 0.5]]).log() + 7
    logits = torch.tensor([[0.25, 0.25, 0.5], [0.25, 0.25, 0.5]]).log() - 3
    scores = compare(exact, logits, torch.tensor([2, 0]))
    np.testing.assert_allclose(scores.divergence, [np.log(2) / 4, 0], atol=1e-6)
    np.testing.assert_allclose(scores.loss, np.log([2, 4]), atol=1e-6)
    np.testing.assert_allclose(scores.exact_loss, np.log([4, 4]), atol=1e-6)
    assert scores.agrees.tolist() == [0, 1]


def test_divergence_of_many_positions_is_that_of_each() -> None:
    """More logits than are compared at a time."""
    random = torch.Generator().manual_seed(0)
    exact, logits = torch.randn(2, 70, 100_000, generator=random)
    following = torch.randint(100_000, (70,), generator=random)
    scores = compare(exact, logits, following)
    p, q = exact[69].double().log_softmax(0), logits[69].double().log_softmax(0)
    assert len(scores.divergence) == 70
    assert scores.divergence[69] == pytest.approx(float((p.exp() * (p - q)).sum()))
    assert scores.loss[69] == pytest.approx(float(-q[following[69]]))
