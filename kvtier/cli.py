"""The `kvtier` command."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from google.protobuf.json_format import MessageToDict
from pydantic import ByteSize
from pydantic.fields import FieldInfo
from rich.console import Console

from kvtier import __version__
from kvtier.config import Config
from kvtier.errors import ConfigurationError, KvtierError
from kvtier.memory import keep_freed_memory
from kvtier.pages.layout import PageFormat

app = typer.Typer(
    help="kvtier keeps the KV cache of language models in 4-bit pages and finds it again: on the device, in host "
    "memory, in Redis.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure kvtier on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def _default_address() -> str:
    return f"unix:{Config.load().socket}"


Address = Annotated[
    str,
    typer.Option(
        help="The daemon. Default: the socket that `kvtier serve` takes from the environment here.",
        default_factory=_default_address,
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def main() -> None:
    """Runs the command; an error that kvtier raises on purpose is one line on stderr and exit code 1."""
    keep_freed_memory()
    try:
        app()
    except KvtierError as error:
        Console(stderr=True, soft_wrap=True).print(f"kvtier: {error}", markup=False)
        sys.exit(1)


def _default_of(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is None:
        return ""
    choices = f" One of {', '.join(get_args(field.annotation))}." if get_origin(field.annotation) is Literal else ""
    return f"{choices} Default: {default.human_readable() if isinstance(default, ByteSize) else default}."


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command one option for each setting of `Config`, which it receives as keyword arguments."""
    hints: dict[str, Any] = {
        "settings_file": Annotated[Path | None, typer.Option("--config", help="TOML file of settings.")]
    }
    for name, field in Config.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        plain = next((kind for kind in (int, float, Path) if kind in kinds), str)
        option = typer.Option(help=f"{field.description}{_default_of(field)}", show_default=False)
        hints[name] = Annotated[plain | None, option]
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, keyword, default=None, annotation=hint) for name, hint in hints.items()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = hints
    return command


@app.command()
@_with_settings
def serve(settings_file: Path | None, **settings: Any) -> None:
    """Run the daemon until SIGTERM or Ctrl-C. It writes what it has to Redis before it ends.

    Every option can be set in the environment (KVTIER_DEVICE_BYTES) and in a TOML file (device_bytes = "8GiB") too.
    """
    from kvtier.daemon.server import serve as serve_daemon

    config = Config.load(settings_file, **settings)
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    asyncio.run(serve_daemon(config))


@app.command()
def stats(address: Address, as_json: AsJson = False) -> None:
    """Show the daemon's caches, pools, hits and Redis."""
    from kvtier.client import Client
    from kvtier.client.report import statistics_table

    with Client(address) as client:
        statistics = client.statistics()
    if as_json:
        typer.echo(json.dumps(MessageToDict(statistics, preserving_proto_field_name=True)))
    else:
        Console().print(statistics_table(statistics))


@app.command()
def health(address: Address) -> None:
    """Exit with 0 if the daemon serves; says whether Redis answers."""
    from kvtier.client import Client

    with Client(address) as client:
        serving = client.is_serving()
        redis = client.statistics().redis
    typer.echo(f"daemon {'serves' if serving else 'does not serve'}; redis breaker {redis.breaker or 'none'}")
    if not serving:
        raise typer.Exit(1)


@app.command()
def flush(namespace: str, address: Address) -> None:
    """Remove a namespace from every tier."""
    from kvtier.client import Client

    with Client(address) as client:
        flushed = client.flush_namespace(namespace)
    typer.echo(
        f"removed {flushed.device_pages} device, {flushed.host_pages} host and {flushed.redis_pages} redis pages; "
        f"{flushed.kept_pages} are in use and stay"
    )


@app.command()
def drain(address: Address, timeout_s: Annotated[int, typer.Option(help="Seconds to write.")] = 30) -> None:
    """Let the daemon refuse new leases and write to Redis what only it has."""
    from kvtier.client import Client

    with Client(address) as client:
        drained = client.drain(timeout_s)
    typer.echo(f"Redis has {drained.stored_pages} pages and lacks {drained.unstored_pages}")


@app.command("stop-redis")
def stop_redis(
    data_dir: Annotated[Path | None, typer.Option(help="Its directory, as `kvtier serve` was given it.")] = None,
) -> None:
    """End the embedded Redis, which outlives its daemon, and forget the pages in it."""
    from kvtier.tiers.embedded import stop_embedded_redis

    stop_embedded_redis(data_dir or Config.load().data_dir)


@app.command()
def demo(
    model: Annotated[Path, typer.Option(help="Local Hugging Face directory, or one with a GGUF file.")],
    page_format: Annotated[PageFormat, typer.Option("--format", help="How pages are stored.")] = PageFormat.NVFP4,
    as_json: AsJson = False,
) -> None:
    """Watch a real model hold conversations whose KV cache travels between device, host memory and Redis."""
    from kvtier.demo import run_demo

    if not run_demo(model, page_format, as_json):
        raise typer.Exit(1)


@app.command()
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
    _require_torch()
    from kvtier.calibrate import run_calibration

    run_calibration(model, recipe, output, text or (), tokens, positions)


@app.command("eval")
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
    plot: Annotated[Path | None, typer.Option(help="Also draw the scores to this file; needs matplotlib.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare what a model says with its cache in each format, with each recipe, with the model as it is."""
    _require_torch()
    from kvtier.bench.table import require_matplotlib
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


@app.command("replay")
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
    plot: Annotated[Path | None, typer.Option(help="Also draw the result to this file; needs matplotlib.")] = None,
    as_json: AsJson = False,
) -> None:
    """Replay agent sessions against a real daemon, with a modelled worker, and see what is found and how fast."""
    from kvtier.replay import Memory, Rates, ReplayOptions, Workload, replay
    from kvtier.replay.geometry import Geometry
    from kvtier.replay.options import parse_bytes, parse_list
    from kvtier.replay.report import plot_rows, require_matplotlib, table_of, title_of

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


@bench.command("lookup")
def bench_lookup(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians.")] = 200, as_json: AsJson = False
) -> None:
    """Measure lookups of a 128K-token prompt over gRPC, beside an echo of the same bytes."""
    from kvtier.bench.lookup import run

    _print_figures(run(rounds), as_json)


@bench.command("redis")
def bench_redis(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians.")] = 9, as_json: AsJson = False
) -> None:
    """Measure pages to and from Redis, beside a bare socket client."""
    from kvtier.bench.redis_bench import run

    _print_figures(run(rounds=rounds), as_json)


@bench.command("transfer")
def bench_transfer(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians.")] = 15,
    decode: Annotated[bool, typer.Option(help="Also measure decode steps while pages move; needs torch.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure pages between GPU and host memory, and acquires of a 128K-token prefix, beside a bare copy."""
    if decode:
        _require_torch()
    from kvtier.bench.transfer import run

    _print_figures(run(rounds, decode), as_json)


@bench.command("decode")
def bench_decode(
    geometries: Annotated[str, typer.Option(help="Query heads/KV heads/head dimension, by comma.")] = (
        "64/8/128,24/4/256"
    ),
    loads: Annotated[str, typer.Option(help="Sequences x tokens, by comma.")] = "64x8192,16x32768,4x131072,1x131072",
    page_sizes: Annotated[str, typer.Option(help="Tokens of a page, by comma.")] = "64",
    replays: Annotated[int, typer.Option(min=1, help="Replays; figures are medians.")] = 40,
    plot: Annotated[Path | None, typer.Option(help="Also draw the result to this file; needs matplotlib.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure decode attention on the GPU, beside every peer that is installed."""
    _require_torch()
    from kvtier.bench.decode import run
    from kvtier.bench.decode_cases import Geometry, Load
    from kvtier.bench.table import plot_decode, require_matplotlib

    if plot:
        require_matplotlib()
    cases = _parse_all(Geometry.parse, geometries), _parse_all(Load.parse, loads), _parse_all(int, page_sizes)
    rows = run(*cases, replays)
    _print_rows([row._asdict() for row in rows], as_json)
    if plot:
        plot_decode(rows, plot)


@bench.command("codec")
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
    _require_torch()
    from kvtier.bench.codec import run
    from kvtier.bench.decode_cases import Geometry

    rows = run(_parse_all(Geometry.parse, geometries), _parse_all(int, tokens), page_size, replays)
    _print_rows([row._asdict() for row in rows], as_json)


@bench.command("serving")
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
    _require_torch()
    from kvtier.bench.serving import run
    from kvtier.bench.serving_cases import ModelShape

    rows = run(ModelShape.parse(geometry), _parse_all(int, contexts), int(pool_gb * 1e9), steps)
    _print_rows([row._asdict() for row in rows], as_json)


def _require_torch() -> None:
    if find_spec("torch") is None:
        raise ConfigurationError("this command computes with torch, which is missing: pip install 'kvtier[ops]'")


def _parse_all(parse: Callable[[str], Any], text: str) -> list[Any]:
    return [parse(part) for part in text.split(",")]


def _print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    from kvtier.bench.table import table_of

    if as_json:
        typer.echo(json.dumps(rows))
    else:
        Console(width=200).print(table_of(rows))


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Show what this machine has and what runs each operation, and test it. Exit with 1 if a result is wrong."""
    _require_torch()
    from kvtier.ops.doctor import examine

    report = examine()
    if as_json:
        typer.echo(json.dumps(report.to_json()))
    else:
        for line in report.lines():
            typer.echo(line)
    if not report.is_healthy:
        raise typer.Exit(1)


def _print_figures(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(figures))
        return
    for name, value in figures.items():
        typer.echo(f"{name:44} {value:.3f}" if isinstance(value, float) else f"{name:44} {value}")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)
