"""Opens a trace file, packed or not, and finds its format by its first characters."""

from __future__ import annotations

import itertools
import json
import lzma
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from kvtier.errors import InvalidRequestError
from kvtier.replay.readers import mooncake, tau, weka
from kvtier.replay.trace import Session

_XZ_MAGIC = b"\xfd7zXZ\x00"


def open_trace(path: Path, max_sessions: int | None = None) -> list[Session]:
    """The first sessions of a trace; raises `InvalidRequestError` when there is none, or it cannot be read."""
    try:
        sessions = list(itertools.islice(_sessions(path), max_sessions))
    except OSError as error:
        raise InvalidRequestError(f"no trace at {path}: {error.strerror or error}") from error
    except (lzma.LZMAError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequestError(
            f"{path} is no trace that can be read ({type(error).__name__}: {error}); see docs/replay.md for the formats"
        ) from error
    if not sessions:
        raise InvalidRequestError(f"{path} has no sessions")
    return sessions


def _sessions(path: Path) -> Iterator[Session]:
    with path.open("rb") as file:
        is_packed = file.read(len(_XZ_MAGIC)) == _XZ_MAGIC
    with lzma.open(path, "rt", encoding="utf-8") if is_packed else path.open(encoding="utf-8") as text:
        first_line = text.readline()
        if first_line.lstrip().startswith("["):
            yield from tau.read_sessions(json.loads(first_line + text.read()))
            return
        records = (json.loads(line) for line in itertools.chain([first_line], text) if line.strip())
        first = next(records, None)
        if first is not None:
            yield from _reader_of(first)(itertools.chain([first], records))


def _reader_of(first: dict[str, Any]) -> Callable[[Iterable[dict[str, Any]]], Iterator[Session]]:
    if "requests" in first:
        return weka.read_sessions
    if "hash_ids" in first:
        return mooncake.read_sessions
    raise ValueError(f"its first line has the fields {', '.join(first)}, neither `requests` nor `hash_ids`")
