"""Commands that run a model, or what a model's agents asked of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvtier.cli.common import AsJson, Plot, require_matplotlib, require_torch
from kvtier.pages.layout import PageFormat


def demo(
    model: Annotated[Path, typer.Option(help="Local Hugging Face directory, or one with a GGUF file.")],
    page_format: Annotated[PageFormat, typer.Option("--format", help="How pages are stored.")] = PageFormat.NVFP4,
    as_json: AsJson = False,
) -> None:
    """Watch a real model hold conversations whose KV cache travels between device, host memory and Redis."""
    from kvtier.demo import run_demo

    if not run_demo(model, page_format, as_json):
        raise typer.Exit(1)


def calibrate(
    model: Annotated[Path, typer.Argument(help="Local Hugging Face directory, or one with a GGUF file.")],
    output: Annotated[Path, typer.Option(help="File of the recipe.")],
    recipe: Annotated[str, typer.Option(help="full, or balanced.")] = "full",
    text: Annotated[list[Path] | None, typer.Option(help="UTF-8 text, repeatable. Default: one of kvtier's.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Read so many tokens at most.")] = None,
    positions: Annotated[
        int | None, typer.Option(min=1, help="Positions that are used. Default: the model's largest context.")
    ] = None,
) -> None:
    """Find out how a model's K and Q are best transformed for 4-bit pages. Killed, it goes on where it was."""
    require_torch()
    from kvtier.calibrate import run_calibration

    run_calibration(model, recipe, output, text or (), tokens, positions)


def evaluate_model(
    model: Annotated[Path, typer.Argument(help="Local Hugging Face directory, or one with a GGUF file.")],
    formats: Annotated[str, typer.Option(help="Page formats by comma.")] = "bf16,fp8,nvfp4",
    recipes: Annotated[
        str, typer.Option(help="Recipes of nvfp4 by comma: plain, search, shipped, or files of `kvtier calibrate`.")
    ] = "plain,search,shipped",
    open_pages: Annotated[str, typer.Option(help="How the newest tokens are kept: bf16, fp8, off.")] = "bf16,off",
    parts: Annotated[str, typer.Option(help="What to measure: scores, needles, replies.")] = "scores,needles",
    contexts: Annotated[str, typer.Option(help="Tokens before the scored ones, by comma.")] = "0,6144",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to score behind each context.")] = 1024,
    needle_tokens: Annotated[str, typer.Option(help="Lengths of the texts with needles, by comma.")] = "512,2048",
    text: Annotated[list[Path] | None, typer.Option(help="UTF-8 text, repeatable. Default: one of kvtier's.")] = None,
    page_size: Annotated[int, typer.Option(help="Tokens of a page.")] = 64,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Compare what a model says with its cache in each format, with each recipe, with the model as it is."""
    require_torch()
    from kvtier.evaluate import EvaluationOptions, evaluate
    from kvtier.evaluate.report import plot_scores, tables

    if plot:
        require_matplotlib()
    options = EvaluationOptions(
        formats, recipes, open_pages, parts, contexts, tokens, needle_tokens, tuple(text or ()), page_size
    )
    evaluation = evaluate(model, options, Console(stderr=True))
    if as_json:
        typer.echo(json.dumps(evaluation.to_json()))
    else:
        console = Console()
        for table in tables(evaluation):
            (console if console.is_terminal else Console(width=200)).print(table)
    if plot:
        plot_scores(evaluation.scores, plot)
