"""`kvtier serve`: the daemon, with one option for each setting."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import ByteSize
from pydantic.fields import FieldInfo

from kvtier.config import Config


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
