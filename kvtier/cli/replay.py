"""`kvtier replay`: what a model's agents asked of it, asked again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvtier.cli.common import AsJson, Plot, require_matplotlib, require_torch
from kvtier.pages.layout import PageFormat

_REAL = "The worker: a real one"
_MODELLED = "The worker: a modelled one, without --model"


def replay_trace(
    trace: Annotated[Path, typer.Argument(help="File of sessions: weka, Mooncake or tau-bench, also packed by xz.")],
    sessions: Annotated[int, typer.Option(min=1, help="Replay the first so many.")] = 100,
    concurrency: Annotated[str, typer.Option(help="Sessions open at a time, by comma.")] = "1,2,4,8,16,32,64",
    think_time_scale: Annotated[float, typer.Option(min=0, help="Multiplies recorded think times.")] = 1.0,
    start_interval_s: Annotated[float, typer.Option(min=0, help="Seconds between the first sessions' starts.")] = 10.0,
    keep_every: Annotated[int, typer.Option(min=1, help="Keep one token of so many, for a small context.")] = 1,
    duration: Annotated[
        float | None, typer.Option(min=1, help="Begin sessions anew for so many seconds, and watch memory meanwhile.")
    ] = None,
    page_format: Annotated[PageFormat, typer.Option("--format", help="How pages are stored.")] = PageFormat.NVFP4,
    compare: Annotated[str | None, typer.Option(help="Formats by comma, instead of --format: the same bytes each.")] = (
        None
    ),
    page_size: Annotated[int, typer.Option(help="Tokens of a page.")] = 64,
    device_bytes: Annotated[str | None, typer.Option(help="Device memory. Default: 80GB; with --model 1GiB.")] = None,
    host_bytes: Annotated[str | None, typer.Option(help="Host memory. Default: 256GB; with --model 4GiB.")] = None,
    redis: Annotated[str, typer.Option(help="Far tier: none, embedded, or a URL. Its size is not limited.")] = "none",
    address: Annotated[
        str | None, typer.Option(help="A running daemon with its own pools. Default: one for each configuration.")
    ] = None,
    metrics: Annotated[str | None, typer.Option(help="HOST:PORT of that daemon's metrics.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Local Hugging Face directory, or one with a GGUF file: run it.", rich_help_panel=_REAL),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Such as cpu or cuda:1. Default: the first GPU if there is one.", rich_help_panel=_REAL),
    ] = None,
    recipe: Annotated[
        str, typer.Option(help="Of nvfp4: plain, search, shipped, or a file.", rich_help_panel=_REAL)
    ] = "shipped",
    geometry: Annotated[
        str, typer.Option(help="LAYERS/KVHEADS/HEADDIM. Default: Llama-3.1-8B's.", rich_help_panel=_MODELLED)
    ] = "32/8/128",
    prefill_tokens_per_s: Annotated[
        float, typer.Option(min=1, help="What the GPU computes.", rich_help_panel=_MODELLED)
    ] = 20_000.0,
    half_rate_context: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Position whose token takes twice as long as the first. Default: none.",
            rich_help_panel=_MODELLED,
        ),
    ] = None,
    decode_tokens_per_s: Annotated[
        float, typer.Option(min=0.1, help="Of each sequence.", rich_help_panel=_MODELLED)
    ] = 60.0,
    host_gb_per_s: Annotated[
        float, typer.Option(min=0.1, help="From host memory to the device.", rich_help_panel=_MODELLED)
    ] = 50.0,
    redis_gb_per_s: Annotated[
        float, typer.Option(min=0.1, help="From Redis to host memory.", rich_help_panel=_MODELLED)
    ] = 5.0,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Replay agent sessions against a real daemon, with a modelled or a real worker: what is found, and how fast."""
    from kvtier.replay import Memory, ModelledEngine, Rates, ReplayOptions, Workload, replay
    from kvtier.replay.engine import Engine
    from kvtier.replay.geometry import Geometry
    from kvtier.replay.options import parse_bytes, parse_list
    from kvtier.replay.report import plot_rows, soak_table, table_of, title_of

    if plot:
        require_matplotlib()
    formats = parse_list(compare, PageFormat, list(PageFormat)) if compare else (page_format,)
    default_device, default_host = ("1GiB", "4GiB") if model else ("80GB", "256GB")
    pools = parse_bytes(device_bytes or default_device), parse_bytes(host_bytes or default_host)
    options = ReplayOptions(
        Workload(
            trace, sessions, parse_list(concurrency, int), think_time_scale, start_interval_s, keep_every, duration
        ),
        Memory(formats, *pools, redis),
        address,
        metrics,
    )
    engine: Engine
    if model:
        require_torch()
        from kvtier.replay.real import RealEngine

        engine = RealEngine.load(model, device, page_size, recipe)
    else:
        rates = (
            prefill_tokens_per_s,
            decode_tokens_per_s,
            host_gb_per_s * 1e9,
            redis_gb_per_s * 1e9,
            half_rate_context,
        )
        engine = ModelledEngine(Geometry.parse(geometry), page_size, Rates(*rates))
    rows = replay(options, engine, Console(stderr=True))
    if as_json:
        typer.echo(json.dumps([row.to_json() for row in rows]))
    else:
        console = Console()
        console = console if console.is_terminal else Console(width=200)
        console.print(table_of(rows, title_of(options, engine)))
        for row in rows:
            if row.soak:
                console.print(soak_table(row.soak, f"{row.format}, {row.concurrency} open, {duration:g} s"))
    if plot:
        plot_rows(rows, plot)
