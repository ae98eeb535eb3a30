"""Tables and a plot of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from kvtier.evaluate.configurations import Configuration
from kvtier.evaluate.rows import Comparison, NeedleRow, ReplyRow, ScoreRow, Verdict
from kvtier.evaluate.run import Evaluation
from kvtier.evaluate.statistics import Interval

_STYLES = {Verdict.LOWER: "green", Verdict.HIGHER: "red", Verdict.WITHIN_NOISE: "dim"}


def tables(evaluation: Evaluation) -> Iterator[Table]:
    """Everything that was measured."""
    for context in dict.fromkeys(row.context for row in evaluation.scores):
        yield scores_table([row for row in evaluation.scores if row.context == context], evaluation.model)
    if evaluation.needles:
        yield needles_table(evaluation.needles)
    if evaluation.replies:
        yield replies_table(evaluation.replies)


def scores_table(rows: Sequence[ScoreRow], model_name: str) -> Table:
    """The rows of one range of positions."""
    first = rows[0]
    table = Table(
        title=f"{model_name}: {first.num_positions:,} positions behind {first.context:,} tokens of context; "
        f"perplexity of the unquantised model {first.exact_perplexity:.2f}",
        caption="KL divergence from the unquantised model in nats; 95% intervals by block bootstrap; comparisons of "
        "mean KL are by position, and `within noise` when the interval of the difference holds 0",
    )
    _add_configuration_columns(table)
    for heading in ("perplexity ratio", "mean KL", "p99 KL", "top-1"):
        table.add_column(heading, justify="right")
    compared = next((row.to_fp8 for row in rows if row.to_fp8), None)
    table.add_column(f"to fp8, open page {compared.other.open_page}" if compared else "to fp8")
    table.add_column("to plain")
    for row in rows:
        table.add_row(
            *_configuration_cells(row.configuration),
            _interval(row.perplexity_ratio, ".3f"),
            _interval(row.mean_kl, "#.2g"),
            _interval(row.p99_kl, "#.2g"),
            _interval(row.top1_agreement, ".3f"),
            _comparison_cell(row.to_fp8),
            _comparison_cell(row.to_plain),
        )
    return table


def needles_table(rows: Sequence[NeedleRow]) -> Table:
    """One row a configuration and length."""
    depths = [finding.depth for finding in rows[0].findings]
    table = Table(title="Facts found in a long text, and the mean log-likelihood of the answer by depth")
    _add_configuration_columns(table)
    for heading in ("tokens", "found", "mean", *(f"{depth:.0%}" for depth in depths)):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            *_configuration_cells(row.configuration),
            f"{row.filler_tokens:,}",
            f"{sum(finding.is_found for finding in row.findings)} of {len(row.findings)}",
            f"{row.mean_log_likelihood:.2f}",
            *(f"{finding.log_likelihood:.2f}" + ("" if finding.is_found else " ✗") for finding in row.findings),
        )
    return table


def replies_table(rows: Sequence[ReplyRow]) -> Table:
    """One row a configuration."""
    table = Table(title="Greedy replies beside those over bf16 pages, from the same history")
    _add_configuration_columns(table)
    for heading in ("same replies", "tokens before the first difference", "median first difference"):
        table.add_column(heading, justify="right")
    for row in rows:
        agreement = row.agreement
        table.add_row(
            *_configuration_cells(row.configuration),
            f"{agreement.num_same} of {agreement.num_turns}",
            f"{agreement.same_share:.1%}",
            "none" if agreement.median_difference is None else f"token {agreement.median_difference:g}",
        )
    return table


def plot_scores(rows: Sequence[ScoreRow], path: Path) -> None:
    """Mean divergence by configuration, one colour a range of positions; the ending of `path` names the file type."""
    from matplotlib.figure import Figure

    configurations = list(dict.fromkeys(row.configuration for row in rows))
    contexts = sorted({row.context for row in rows})
    width = 0.8 / len(contexts)
    figure = Figure(figsize=(3 + 0.9 * len(configurations), 5), layout="constrained")
    axes = figure.subplots()
    for index, context in enumerate(contexts):
        own = [row for row in rows if row.context == context]
        places = [configurations.index(row.configuration) + (index + 0.5) * width - 0.4 for row in own]
        values = [row.mean_kl.value for row in own]
        errors = [
            [row.mean_kl.value - row.mean_kl.low for row in own],
            [row.mean_kl.high - row.mean_kl.value for row in own],
        ]
        axes.bar(places, values, width, yerr=errors, capsize=2, label=f"behind {context:,} tokens")
    axes.set_yscale("log")
    titles = [configuration.title.replace(", ", "\n") for configuration in configurations]
    axes.set_xticks(range(len(configurations)), titles, rotation=45, ha="right")
    axes.set_ylabel("mean KL from the unquantised model (nats)")
    axes.legend()
    figure.savefig(path)


def _add_configuration_columns(table: Table) -> None:
    for heading in ("format", "recipe", "open page"):
        table.add_column(heading)


def _configuration_cells(configuration: Configuration) -> tuple[str, str, str]:
    return configuration.page_format.value, escape(configuration.recipe_label), configuration.open_page.value


def _interval(interval: Interval, form: str) -> str:
    return f"{interval.value:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def _comparison_cell(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    style = _STYLES[comparison.verdict]
    return f"[{style}]{comparison.verdict} {comparison.difference.value:+#.2g}[/{style}]"
