"""The texts that a model is evaluated on, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from kvtier.calibrate.texts import read_text
from kvtier.errors import InvalidRequestError


def load_corpus(paths: Sequence[Path], tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> list[list[int]]:
    """Token ids of each text file, or of the text that comes with kvtier; each at least `num_tokens` long.

    Raises `InvalidRequestError` for a file that cannot be read, and for a text that is too short.
    """
    texts = {str(path): read_text(path) for path in paths}
    if not texts:
        texts["the text that comes with kvtier"] = (
            files("kvtier.evaluate").joinpath("texts/evaluation.txt").read_text("utf-8")
        )
    corpus: list[list[int]] = []
    for name, text in texts.items():
        tokens = list(tokenizer(text, verbose=False)["input_ids"])
        if len(tokens) < num_tokens:
            raise InvalidRequestError(
                f"{name} has {len(tokens):,} tokens and {num_tokens:,} are needed; give a longer text, or ask for "
                "shorter --contexts or fewer --tokens"
            )
        corpus.append(tokens)
    return corpus
