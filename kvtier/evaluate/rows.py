"""The rows of an evaluation, with names that stay: what `--json` prints, and tables and plots are made of."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from kvtier.evaluate.configurations import Configuration
from kvtier.evaluate.divergence import PositionScores
from kvtier.evaluate.needles import Finding
from kvtier.evaluate.replies import Agreement
from kvtier.evaluate.scoring import TextScores
from kvtier.evaluate.statistics import Interval, Resamples, exponential_mean, mean, percentile_99
from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import PLAIN
from kvtier.worker import OpenPage


class Verdict(StrEnum):
    """How a divergence compares with another one at the same positions."""

    LOWER = "lower"
    HIGHER = "higher"
    WITHIN_NOISE = "within noise"


class Comparison(NamedTuple):
    """Mean divergence less that of another configuration, in nats."""

    other: Configuration
    difference: Interval

    @property
    def verdict(self) -> Verdict:
        """Whether the interval of the difference leaves out 0."""
        if not self.difference.excludes_zero:
            return Verdict.WITHIN_NOISE
        return Verdict.LOWER if self.difference.value < 0 else Verdict.HIGHER


class ScoreRow(NamedTuple):
    """One configuration at one range of positions; divergences in nats, agreement as a share.

    `to_fp8` compares with FP8 pages, `to_plain` with NVFP4 pages of the recipe `plain` and the same open page: None
    where that was not measured, or is the row itself, or the row is not NVFP4.
    """

    configuration: Configuration
    context: int
    num_positions: int
    exact_perplexity: float
    perplexity: Interval
    perplexity_ratio: Interval
    mean_kl: Interval
    p99_kl: Interval
    top1_agreement: Interval
    to_fp8: Comparison | None
    to_plain: Comparison | None

    def to_json(self) -> dict[str, Any]:
        """Flat; an interval is `name`, `name_low` and `name_high`."""
        row: dict[str, Any] = {
            **configuration_json(self.configuration),
            "context": self.context,
            "positions": self.num_positions,
            "exact_perplexity": self.exact_perplexity,
        }
        for name in ("perplexity", "perplexity_ratio", "mean_kl", "p99_kl", "top1_agreement"):
            row |= _interval_json(name, self._asdict()[name])
        for name, comparison in (("fp8", self.to_fp8), ("plain", self.to_plain)):
            row |= _comparison_json(name, comparison)
        return row


class NeedleRow(NamedTuple):
    """Facts found by one configuration in a text of `filler_tokens`, all of them and by depth."""

    configuration: Configuration
    filler_tokens: int
    findings: Sequence[Finding]

    @property
    def found_share(self) -> float:
        return float(np.mean([finding.is_found for finding in self.findings]))

    @property
    def mean_log_likelihood(self) -> float:
        return float(np.mean([finding.log_likelihood for finding in self.findings]))

    def to_json(self) -> dict[str, Any]:
        return {
            **configuration_json(self.configuration),
            "filler_tokens": self.filler_tokens,
            "found_share": self.found_share,
            "mean_log_likelihood": self.mean_log_likelihood,
            "depths": [finding.depth for finding in self.findings],
            "found": [finding.is_found for finding in self.findings],
            "log_likelihoods": [finding.log_likelihood for finding in self.findings],
            "cached_tokens": [finding.cached_tokens for finding in self.findings],
        }


class ReplyRow(NamedTuple):
    """Replies of one configuration beside those over bf16 pages."""

    configuration: Configuration
    agreement: Agreement

    def to_json(self) -> dict[str, Any]:
        return {**configuration_json(self.configuration), **self.agreement._asdict()}


def score_rows(configurations: Sequence[Configuration], scores: TextScores) -> list[ScoreRow]:
    """One row a configuration."""
    resamples = Resamples(scores.lengths)
    by_configuration = dict(zip(configurations, scores.configurations, strict=True))
    return [_score_row(configuration, by_configuration, scores.context, resamples) for configuration in configurations]


def configuration_json(configuration: Configuration) -> dict[str, Any]:
    return {
        "format": configuration.page_format.value,
        "recipe": configuration.recipe_label,
        "recipe_digest": configuration.recipe.digest,
        "open_page": configuration.open_page.value,
    }


def _score_row(
    configuration: Configuration,
    by_configuration: dict[Configuration, PositionScores],
    context: int,
    resamples: Resamples,
) -> ScoreRow:
    scores = by_configuration[configuration]
    fp8, plain = _fp8_of(by_configuration), _plain_of(by_configuration, configuration.open_page)

    def compared(other: Configuration | None) -> Comparison | None:
        if other is None or other == configuration or configuration.page_format is not PageFormat.NVFP4:
            return None
        differences = scores.divergence - by_configuration[other].divergence
        return Comparison(other, resamples.interval(differences, mean))

    return ScoreRow(
        configuration=configuration,
        context=context,
        num_positions=len(scores.loss),
        exact_perplexity=float(exponential_mean(scores.exact_loss)),
        perplexity=resamples.interval(scores.loss, exponential_mean),
        perplexity_ratio=resamples.interval(scores.loss - scores.exact_loss, exponential_mean),
        mean_kl=resamples.interval(scores.divergence, mean),
        p99_kl=resamples.interval(scores.divergence, percentile_99),
        top1_agreement=resamples.interval(scores.agrees, mean),
        to_fp8=compared(fp8),
        to_plain=compared(plain),
    )


def _fp8_of(configurations: dict[Configuration, PositionScores]) -> Configuration | None:
    """FP8 as others have it, without an open page of its own, if it was measured; else with one."""
    found = [each for each in configurations if each.page_format is PageFormat.FP8]
    return min(found, key=lambda each: each.open_page is not OpenPage.OFF, default=None)


def _plain_of(configurations: dict[Configuration, PositionScores], open_page: OpenPage) -> Configuration | None:
    wanted = (PageFormat.NVFP4, PLAIN.digest, open_page)
    found = (each for each in configurations if (each.page_format, each.recipe.digest, each.open_page) == wanted)
    return next(found, None)


def _interval_json(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _comparison_json(name: str, comparison: Comparison | None) -> dict[str, Any]:
    difference = comparison.difference if comparison else (None, None, None)
    return {
        **dict(zip((f"kl_less_{name}", f"kl_less_{name}_low", f"kl_less_{name}_high"), difference, strict=True)),
        f"kl_to_{name}": comparison.verdict.value if comparison else None,
        f"{name}_open_page": comparison.other.open_page.value if comparison else None,
    }
