"""`kvtier bench`: what this machine does."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtier.cli.common import AsJson, Plot, parse_all, print_figures, print_rows, require_matplotlib, require_torch

app = typer.Typer(help="Measure kvtier on this machine.", no_args_is_help=True)


@app.command("lookup")
def bench_lookup(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians.")] = 200, as_json: AsJson = False
) -> None:
    """Measure lookups of a 128K-token prompt over gRPC, beside an echo of the same bytes."""
    from kvtier.bench.lookup import run

    print_figures(run(rounds), as_json)


@app.command("redis")
def bench_redis(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians.")] = 9, as_json: AsJson = False
) -> None:
    """Measure pages to and from Redis, beside a bare socket client."""
    from kvtier.bench.redis_bench import run

    print_figures(run(rounds=rounds), as_json)


@app.command("transfer")
def bench_transfer(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians.")] = 15,
    decode: Annotated[bool, typer.Option(help="Also measure decode steps while pages move; needs torch.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure pages between GPU and host memory, and acquires of a 128K-token prefix, beside a bare copy."""
    if decode:
        require_torch()
    from kvtier.bench.transfer import run

    print_figures(run(rounds, decode), as_json)


@app.command("decode")
def bench_decode(
    geometries: Annotated[str, typer.Option(help="Query heads/KV heads/head dimension, by comma.")] = (
        "64/8/128,24/4/256"
    ),
    loads: Annotated[str, typer.Option(help="Sequences x tokens, by comma.")] = "64x8192,16x32768,4x131072,1x131072",
    page_sizes: Annotated[str, typer.Option(help="Tokens of a page, by comma.")] = "64",
    replays: Annotated[int, typer.Option(min=1, help="Replays; figures are medians.")] = 40,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Measure decode attention on the GPU, beside every peer that is installed."""
    require_torch()
    from kvtier.bench.decode import run
    from kvtier.bench.decode_cases import Geometry, Load
    from kvtier.bench.table import plot_decode

    if plot:
        require_matplotlib()
    cases = parse_all(Geometry.parse, geometries), parse_all(Load.parse, loads), parse_all(int, page_sizes)
    rows = run(*cases, replays)
    print_rows([row._asdict() for row in rows], as_json)
    if plot:
        plot_decode(rows, plot)


@app.command("codec")
def bench_codec(
    geometries: Annotated[str, typer.Option(help="Query heads/KV heads/head dimension, by comma.")] = (
        "64/8/128,24/4/256"
    ),
    tokens: Annotated[str, typer.Option(help="Tokens of a call, by comma.")] = "64,8192,32768,131072",
    page_size: Annotated[int, typer.Option(help="Tokens of a page.")] = 64,
    replays: Annotated[int, typer.Option(min=1, help="Replays; figures are medians.")] = 15,
    as_json: AsJson = False,
) -> None:
    """Measure quantising tokens into pages, and gathering them, on the GPU."""
    require_torch()
    from kvtier.bench.codec import run
    from kvtier.bench.decode_cases import Geometry

    rows = run(parse_all(Geometry.parse, geometries), parse_all(int, tokens), page_size, replays)
    print_rows([row._asdict() for row in rows], as_json)


@app.command("serving")
def bench_serving(
    geometry: Annotated[
        str, typer.Option(help="Layers/hidden/query heads/KV heads/head dimension/FFN/vocabulary. Llama-3.1-8B's.")
    ] = "32/4096/32/8/128/14336/128256",
    contexts: Annotated[str, typer.Option(help="Tokens of a sequence, by comma.")] = "32768,131072,262144",
    pool_gb: Annotated[float, typer.Option(min=0.1, help="GB of pages, the same for every format.")] = 80.0,
    steps: Annotated[int, typer.Option(min=1, help="Steps; figures are medians.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Measure how fast a worker decodes on the GPU with each page format, at equal concurrency and equal memory.

    The weights are random, and so is what the pages hold.
    """
    require_torch()
    from kvtier.bench.serving import run
    from kvtier.bench.serving_cases import ModelShape

    rows = run(ModelShape.parse(geometry), parse_all(int, contexts), int(pool_gb * 1e9), steps)
    print_rows([row._asdict() for row in rows], as_json)
