"""The texts that a model is calibrated on, as windows of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from kvtier.errors import InvalidRequestError


class Texts(NamedTuple):
    """Texts as one model sees them.

    `windows` are the tokens of sequences that each begin anew, and `digest` is BLAKE2b-128 of the texts themselves, as
    hexadecimal text.
    """

    windows: tuple[tuple[int, ...], ...]
    digest: str

    @property
    def num_tokens(self) -> int:
        """Of all windows."""
        return sum(map(len, self.windows))


def read_texts(paths: Sequence[Path]) -> list[str]:
    """The contents of UTF-8 files, or the text that comes with kvtier when there are none.

    Raises `InvalidRequestError` for a file that cannot be read or is blank.
    """
    if not paths:
        return [files("kvtier.calibrate").joinpath("texts", "calibration.txt").read_text("utf-8")]
    return [read_text(path) for path in paths]


def tokenize_texts(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, window_tokens: int, max_tokens: int | None = None
) -> Texts:
    """Cuts each text into windows of `window_tokens`, and stops after `max_tokens` altogether.

    Every window begins with the token that the tokenizer puts before a text, if there is one: models are used so, and
    some go astray without it.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"kvtier texts")
    windows: list[tuple[int, ...]] = []
    left = max_tokens
    for text in texts:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
        for window in _windows(tokenizer(text).input_ids, tokenizer.bos_token_id, window_tokens):
            windows.append(window[:left])
            left = None if left is None else left - len(windows[-1])
    return Texts(tuple(window for window in windows if window), digest.hexdigest())


def read_text(path: Path) -> str:
    """A UTF-8 file; raises `InvalidRequestError` when it cannot be read or is blank."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"cannot read a text from {path}: {error}") from error
    if not text.strip():
        raise InvalidRequestError(f"there is no text in {path}")
    return text


def _windows(tokens: list[int], bos_token: int | None, window_tokens: int) -> Iterable[tuple[int, ...]]:
    prefix = tokens[:1] if tokens[:1] == [bos_token] else []
    step = window_tokens - len(prefix)
    for start in range(len(prefix), len(tokens), step):
        yield (*prefix, *tokens[start : start + step])
