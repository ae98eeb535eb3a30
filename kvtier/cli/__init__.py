"""The `kvtier` command. What one needs is imported when it runs, so that `kvtier stats` does not wait for torch."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from kvtier.cli import bench, models, operate, replay, serve
from kvtier.errors import KvtierError
from kvtier.memory import keep_memory_at_hand

app = typer.Typer(
    help="kvtier keeps the KV cache of language models in 4-bit pages and finds it again: on the device, in host "
    "memory, in Redis.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (serve.serve, operate.stats, operate.health, operate.flush, operate.drain):
    app.command()(command)
app.command("stop-redis")(operate.stop_redis)
for command in (operate.doctor, models.demo, models.calibrate):
    app.command()(command)
app.command("eval")(models.evaluate_model)
app.command("replay")(replay.replay_trace)
app.add_typer(bench.app, name="bench")
app.command()(operate.version)


def main() -> None:
    """Runs the command; an error that kvtier raises on purpose is one line on stderr and exit code 1."""
    keep_memory_at_hand()
    try:
        app()
    except KvtierError as error:
        Console(stderr=True, soft_wrap=True).print(f"kvtier: {error}", markup=False)
        sys.exit(1)
