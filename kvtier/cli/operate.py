"""Commands that operate a daemon, or look at this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console

from kvtier import __version__
from kvtier.cli.common import Address, AsJson, require_torch
from kvtier.config import Config


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


def health(address: Address) -> None:
    """Exit with 0 if the daemon serves; says whether Redis answers."""
    from kvtier.client import Client

    with Client(address) as client:
        serving = client.is_serving()
        redis = client.statistics().redis
    typer.echo(f"daemon {'serves' if serving else 'does not serve'}; redis breaker {redis.breaker or 'none'}")
    if not serving:
        raise typer.Exit(1)


def flush(namespace: str, address: Address) -> None:
    """Remove a namespace from every tier."""
    from kvtier.client import Client

    with Client(address) as client:
        flushed = client.flush_namespace(namespace)
    typer.echo(
        f"removed {flushed.device_pages} device, {flushed.host_pages} host and {flushed.redis_pages} redis pages; "
        f"{flushed.kept_pages} are in use and stay"
    )


def drain(address: Address, timeout_s: Annotated[int, typer.Option(help="Seconds to write.")] = 30) -> None:
    """Let the daemon refuse new leases and write to Redis what only it has."""
    from kvtier.client import Client

    with Client(address) as client:
        drained = client.drain(timeout_s)
    typer.echo(f"Redis has {drained.stored_pages} pages and lacks {drained.unstored_pages}")


def stop_redis(
    data_dir: Annotated[Path | None, typer.Option(help="Its directory, as `kvtier serve` was given it.")] = None,
) -> None:
    """End the embedded Redis, which outlives its daemon, and forget the pages in it."""
    from kvtier.tiers.embedded import stop_embedded_redis

    stop_embedded_redis(data_dir or Config.load().data_dir)


def doctor(as_json: AsJson = False) -> None:
    """Show what this machine has and what runs each operation, and test it. Exit with 1 if a result is wrong."""
    require_torch()
    from kvtier.ops.doctor import examine

    report = examine()
    if as_json:
        typer.echo(json.dumps(report.to_json()))
    else:
        for line in report.lines():
            typer.echo(line)
    if not report.is_healthy:
        raise typer.Exit(1)


def version() -> None:
    """Print the version."""
    typer.echo(__version__)
