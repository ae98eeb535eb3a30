"""What commands share: options that several have, and how results are printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvtier.config import Config
from kvtier.errors import ConfigurationError


def default_address() -> str:
    return f"unix:{Config.load().socket}"


Address = Annotated[
    str,
    typer.Option(
        help="The daemon. Default: the socket that `kvtier serve` takes from the environment here.",
        default_factory=default_address,
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Plot = Annotated[Path | None, typer.Option(help="Also draw the result to this file; needs matplotlib.")]


def require_torch() -> None:
    if find_spec("torch") is None:
        raise ConfigurationError("this command computes with torch, which is missing: pip install 'kvtier[ops]'")


def require_matplotlib() -> None:
    """Raises `ConfigurationError` when plots cannot be drawn, before anything is measured."""
    if find_spec("matplotlib") is None:
        raise ConfigurationError("--plot needs matplotlib: pip install matplotlib")


def parse_all(parse: Callable[[str], Any], text: str) -> list[Any]:
    return [parse(part) for part in text.split(",")]


def print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    from kvtier.bench.table import table_of

    if as_json:
        typer.echo(json.dumps(rows))
    else:
        Console(width=200).print(table_of(rows))


def print_figures(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(figures))
        return
    for name, value in figures.items():
        typer.echo(f"{name:44} {value:.3f}" if isinstance(value, float) else f"{name:44} {value}")
