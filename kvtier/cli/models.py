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


def replay_trace(
    trace: Annotated[Path, typer.Argument(help="File of sessions: weka, Mooncake or tau-bench, also packed by xz.")],
    sessions: Annotated[int, typer.Option(min=1, help="Replay the first so many.")] = 100,
    concurrency: Annotated[str, typer.Option(help="Sessions open at a time, by comma.")] = "1,2,4,8,16,32,64",
    think_time_scale: Annotated[float, typer.Option(min=0, help="Multiplies recorded think times.")] = 1.0,
    start_interval_s: Annotated[float, typer.Option(min=0, help="Seconds between the first sessions' starts.")] = 10.0,
    page_format: Annotated[PageFormat, typer.Option("--format", help="How pages are stored.")] = PageFormat.NVFP4,
    compare: Annotated[str | None, typer.Option(help="Formats by comma, instead of --format: the same bytes each.")] = (
        None
    ),
    geometry: Annotated[str, typer.Option(help="LAYERS/KVHEADS/HEADDIM of the model. Default: Llama-3.1-8B's.")] = (
        "32/8/128"
    ),
    page_size: Annotated[int, typer.Option(help="Tokens of a page.")] = 64,
    device_bytes: Annotated[str, typer.Option(help="Device memory for pages.")] = "80GB",
    host_bytes: Annotated[str, typer.Option(help="Host memory for pages.")] = "256GB",
    redis: Annotated[str, typer.Option(help="Far tier: none, embedded, or a URL. Its size is not limited.")] = "none",
    prefill_tokens_per_s: Annotated[float, typer.Option(min=1, help="What the GPU computes.")] = 20_000.0,
    half_rate_context: Annotated[
        float | None, typer.Option(min=1, help="Position whose token takes twice as long as the first. Default: none.")
    ] = None,
    decode_tokens_per_s: Annotated[float, typer.Option(min=0.1, help="Of each sequence.")] = 60.0,
    host_gb_per_s: Annotated[float, typer.Option(min=0.1, help="From host memory to the device.")] = 50.0,
    redis_gb_per_s: Annotated[float, typer.Option(min=0.1, help="From Redis to host memory.")] = 5.0,
    address: Annotated[
        str | None, typer.Option(help="A running daemon with its own pools. Default: one for each configuration.")
    ] = None,
    metrics: Annotated[str | None, typer.Option(help="HOST:PORT of that daemon's metrics.")] = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Replay agent sessions against a real daemon, with a modelled worker, and see what is found and how fast."""
    from kvtier.replay import Memory, Rates, ReplayOptions, Workload, replay
    from kvtier.replay.geometry import Geometry
    from kvtier.replay.options import parse_bytes, parse_list
    from kvtier.replay.report import plot_rows, table_of, title_of

    if plot:
        require_matplotlib()
    formats = parse_list(compare, PageFormat, list(PageFormat)) if compare else (page_format,)
    options = ReplayOptions(
        Workload(trace, sessions, parse_list(concurrency, int), think_time_scale, start_interval_s),
        Memory(formats, Geometry.parse(geometry), page_size, parse_bytes(device_bytes), parse_bytes(host_bytes), redis),
        Rates(prefill_tokens_per_s, decode_tokens_per_s, host_gb_per_s * 1e9, redis_gb_per_s * 1e9, half_rate_context),
        address,
        metrics,
    )
    rows = replay(options, Console(stderr=True))
    if as_json:
        typer.echo(json.dumps([row._asdict() for row in rows]))
    else:
        console = Console()
        (console if console.is_terminal else Console(width=200)).print(table_of(rows, title_of(options)))
    if plot:
        plot_rows(rows, plot)
