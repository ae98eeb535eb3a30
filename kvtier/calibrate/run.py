"""`kvtier calibrate`: a model, texts, and a recipe in a file."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError

from kvtier.calibrate.moments import Moments, collect_moments
from kvtier.calibrate.rotation import rotations_of
from kvtier.calibrate.solve import check_head_dim, solve_recipe
from kvtier.calibrate.texts import Texts, read_texts, tokenize_texts
from kvtier.errors import InvalidRequestError
from kvtier.pages.recipe import Origin, Recipe, RecipeName
from kvtier.worker import WorkerModel, load_model, load_tokenizer

WINDOW_TOKENS = 1024
_TOKENS_A_CHANNEL = 4  # fewer say too little of the moments of a head


def run_calibration(
    model_directory: Path,
    name: str,
    output: Path,
    text_files: Sequence[Path] = (),
    max_tokens: int | None = None,
    num_positions: int | None = None,
) -> Recipe:
    """Calibrates a recipe, writes it to `output` and says so on stderr.

    Args:
        model_directory: as `load_model` takes it.
        name: "balanced" or "full".
        text_files: UTF-8 texts; that which comes with kvtier when there are none.
        max_tokens: tokens of the texts that are read; all of them when None.
        num_positions: positions that the model is used at; its largest context when None.

    Raises:
        InvalidRequestError: the model, a text, the recipe's name or the output cannot be used.
    """
    console = Console(stderr=True, soft_wrap=True)
    recipe_name = _calibrated_name(name)
    _check_writable(output)
    contents = read_texts(text_files)
    console.print(f"loading the model in {model_directory}", highlight=False)
    model = load_model(model_directory)
    check_head_dim(recipe_name, model.geometry.head_dim)
    rotations = rotations_of(model)
    tokenizer = load_tokenizer(model_directory)
    texts = tokenize_texts(contents, tokenizer, min(WINDOW_TOKENS, model.max_tokens), max_tokens)
    _check_length(texts, model)
    partial = output.with_name(f".{output.name}.moments")
    moments = _collect(model, texts, partial, console)
    num_positions = num_positions or model.max_tokens
    origin = Origin(model.name, model.revision, num_positions, texts.digest, texts.num_tokens)
    recipe = solve_recipe(recipe_name, moments, rotations, num_positions, origin)
    try:
        recipe.save(output)
    except (OSError, SafetensorError) as error:
        raise InvalidRequestError(f"cannot write {output}: {error}") from error
    partial.unlink()
    console.print(f"{output}: {recipe.digest}, from {texts.num_tokens} tokens", highlight=False)
    return recipe


def _collect(model: WorkerModel, texts: Texts, partial: Path, console: Console) -> Moments:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{texts.num_tokens} tokens", total=texts.num_tokens)
        return collect_moments(
            model,
            texts,
            partial,
            lambda done: progress.update(task, completed=done),
            lambda message: progress.console.print(message, highlight=False),
        )


def _calibrated_name(name: str) -> RecipeName:
    calibrated = [known for known in RecipeName if known.is_calibrated]
    if name not in calibrated:
        raise InvalidRequestError(f"{name!r} is no recipe that is calibrated; choose {' or '.join(calibrated)}")
    return RecipeName(name)


def _check_writable(output: Path) -> None:
    """Fails before the work of minutes, not after."""
    if output.is_dir():
        raise InvalidRequestError(f"{output} is a directory; name a file in it")
    try:
        tempfile.TemporaryFile(dir=output.parent).close()
    except OSError as error:
        raise InvalidRequestError(f"cannot write to {output.parent}: {error.strerror}") from error


def _check_length(texts: Texts, model: WorkerModel) -> None:
    needed = _TOKENS_A_CHANNEL * model.geometry.head_dim
    if texts.num_tokens < needed:
        raise InvalidRequestError(
            f"{texts.num_tokens} tokens are too few to calibrate on: {model.name} has heads of "
            f"{model.geometry.head_dim} channels and needs {needed}; more are better"
        )
