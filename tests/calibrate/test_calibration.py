"""Moments of a model's texts, and `kvtier calibrate` from the directory of a model to the file of a recipe."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from calibration_models import BEGIN, MAX_TOKENS, byte_tokenizer, random_texts, save_model, small_model
from safetensors.torch import save_file

from kvtier.calibrate import Moments, collect_moments, read_texts, run_calibration, tokenize_texts
from kvtier.errors import InvalidRequestError
from kvtier.ops import prefill_attention
from kvtier.pages.recipe import Recipe, RecipeName
from kvtier.worker.attention import LayerCall


class Killed(Exception):
    """Stands for a signal."""


class KeptCalls:
    """Causal attention that keeps queries and keys."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []

    def attend(self, call: LayerCall) -> torch.Tensor:
        self.calls.append(call)
        return prefill_attention(call.query, call.key, call.value, call.softmax_scale, call.sliding_window)


def ignore(message: object) -> None:
    """For progress that a test does not look at."""


def kill_after(num_tokens: int) -> object:
    def on_window(done: int) -> None:
        if done >= num_tokens:
            raise Killed

    return on_window


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_moments_are_sums_over_tokens_and_the_heads_of_a_group(architecture: str, tmp_path: Path) -> None:
    model, texts = small_model(architecture), random_texts(num_windows=2)
    moments = collect_moments(model, texts, tmp_path / "moments", ignore, ignore)
    assert moments.num_windows == 2

    keys, queries = torch.zeros_like(moments.keys), torch.zeros_like(moments.queries)
    for window in texts.windows:
        kept = KeptCalls()
        with torch.inference_mode():
            model.module(input_ids=torch.tensor([window]), use_cache=False, kvtier_batch=kept)
        for call in kept.calls:
            for head in range(4):
                queries[call.layer, head // 2] += (call.query[:, head].T @ call.query[:, head]).double()
            for head in range(2):
                keys[call.layer, head] += (call.key[:, head].T @ call.key[:, head]).double()
    assert torch.allclose(moments.keys, keys, rtol=1e-4, atol=1e-5 * float(keys.abs().max()))
    assert torch.allclose(moments.queries, queries, rtol=1e-4, atol=1e-5 * float(queries.abs().max()))


def test_what_is_resumed_equals_what_was_not(tmp_path: Path) -> None:
    model, texts = small_model("llama"), random_texts(num_windows=4)
    done: list[int] = []
    whole = collect_moments(model, texts, tmp_path / "whole", done.append, ignore)
    assert done == [0, 64, 128, 192, 256]

    with pytest.raises(Killed):
        collect_moments(model, texts, tmp_path / "killed", kill_after(128), ignore)  # type: ignore[arg-type]
    done, messages = [], []
    resumed = collect_moments(model, texts, tmp_path / "killed", done.append, messages.append)
    assert done == [128, 192, 256]
    assert messages == [f"going on behind window 2 of 4, from {tmp_path}/killed"]
    assert torch.equal(resumed.keys, whole.keys)
    assert torch.equal(resumed.queries, whole.queries)


@pytest.mark.parametrize("left", ["other texts", "another model", "another file", "torn", "no file of tensors"])
def test_a_partial_file_of_something_else_is_not_used(left: str, tmp_path: Path) -> None:
    model, texts, partial = small_model("llama"), random_texts(num_windows=2), tmp_path / "moments"
    whole = collect_moments(model, texts, tmp_path / "whole", ignore, ignore)
    match left:
        case "other texts":
            collect_moments(model, random_texts(num_windows=3), partial, ignore, ignore)
        case "another model":
            collect_moments(small_model("yarn"), texts, partial, ignore, ignore)
        case "another file":
            save_file({"keys": torch.ones(2)}, partial)
        case "torn":
            partial.write_bytes((tmp_path / "whole").read_bytes()[:-8])
        case _:
            partial.write_text("not tensors")
    messages: list[str] = []
    moments = collect_moments(model, texts, partial, ignore, messages.append)
    assert messages == [f"{partial} is damaged or of another calibration: beginning anew"]
    assert torch.equal(moments.keys, whole.keys)


def test_windows_begin_with_the_first_token_of_a_text() -> None:
    texts = tokenize_texts(["abcdefgh", "xy"], byte_tokenizer(), window_tokens=4)
    letters = [byte_tokenizer().decode(window) for window in texts.windows]
    assert letters == ["<begin>abc", "<begin>def", "<begin>gh", "<begin>xy"]
    assert all(window[0] == BEGIN for window in texts.windows)
    assert texts.num_tokens == 14


def test_tokens_are_bounded_and_texts_named() -> None:
    few = tokenize_texts(["abcdefgh"], byte_tokenizer(), 4, max_tokens=6)
    assert [len(window) for window in few.windows] == [4, 2]
    assert few.digest == tokenize_texts(["abcdefgh"], byte_tokenizer(), 4).digest
    assert few.digest != tokenize_texts(["abcd", "efgh"], byte_tokenizer(), 4).digest


def test_the_text_that_comes_with_kvtier_is_enough_for_a_head_of_256_channels() -> None:
    (text,) = read_texts([])
    assert len(text.split()) > 4000


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 30)
    return path


@pytest.mark.parametrize("name", ["balanced", "full"])
def test_from_a_model_to_a_file(name: str, model_directory: Path, text_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "recipe.safetensors"
    run_calibration(model_directory, name, output, [text_file], max_tokens=900)
    recipe = Recipe.load(output)
    assert recipe.name is RecipeName(name)
    assert (recipe.origin.model, recipe.origin.num_positions) == (model_directory.name, MAX_TOKENS)
    assert recipe.origin.num_tokens == 900
    recipe.check_fits(recipe.origin.model, recipe.origin.revision, 2, 2, 32)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.safetensors", "text.txt"]

    run_calibration(model_directory, name, tmp_path / "again.safetensors", [text_file], max_tokens=900)
    assert (tmp_path / "again.safetensors").read_bytes() == output.read_bytes()


def test_a_killed_command_goes_on_to_the_same_bytes(
    model_directory: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_calibration(model_directory, "full", tmp_path / "whole", [text_file])

    add = Moments.add

    def killed(moments: Moments, *arguments: object) -> None:
        if moments.num_windows == 2:
            raise Killed
        add(moments, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Moments, "add", killed)
        run_calibration(model_directory, "full", tmp_path / "killed", [text_file])
    assert (tmp_path / ".killed.moments").exists()
    assert not (tmp_path / "killed").exists()

    run_calibration(model_directory, "full", tmp_path / "killed", [text_file])
    assert (tmp_path / "killed").read_bytes() == (tmp_path / "whole").read_bytes()
    assert not (tmp_path / ".killed.moments").exists()


def test_faults_are_found_before_the_model_runs(model_directory: Path, text_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "recipe"
    faults: dict[str, tuple[Path, str, Path, list[Path]]] = {
        "cannot read a text from": (model_directory, "full", output, [tmp_path / "none.txt"]),
        "there is no text in": (model_directory, "full", output, [_file(tmp_path / "blank.txt", b" \n")]),
        "codec can't decode": (model_directory, "full", output, [_file(tmp_path / "binary.txt", b"\xff\xfe")]),
        "40 tokens are too few": (model_directory, "full", output, [_file(tmp_path / "short.txt", b"a" * 39)]),
        "cannot write to": (model_directory, "full", tmp_path / "none" / "recipe", [text_file]),
        "is a directory": (model_directory, "full", tmp_path, [text_file]),
        "'plain' is no recipe that is calibrated; choose balanced or full": (
            model_directory,
            "plain",
            output,
            [text_file],
        ),
        "no model at": (tmp_path, "full", output, [text_file]),
    }
    for fault, (directory, name, path, texts) in faults.items():
        with pytest.raises(InvalidRequestError, match=fault):
            run_calibration(directory, name, path, texts)
    assert not output.exists()


@pytest.mark.parametrize(
    ("architecture", "name", "fault"),
    [
        ("cohere", "balanced", "does not turn channel c with channel"),
        ("llama of head dimension 48", "balanced", "needs a power of two, use `full`"),
    ],
)
def test_models_that_cannot_be_calibrated(
    architecture: str, name: str, fault: str, text_file: Path, tmp_path: Path
) -> None:
    directory = save_model(architecture, tmp_path / "model")
    with pytest.raises(InvalidRequestError, match=fault):
        run_calibration(directory, name, tmp_path / "recipe", [text_file])


def test_the_command(model_directory: Path, text_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "recipe"
    arguments = [model_directory, "--recipe", "full", "--output", output, "--text", text_file, "--positions", "2000"]
    done = subprocess.run(
        [sys.executable, "-m", "kvtier", "calibrate", *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    recipe = Recipe.load(output)
    assert recipe.origin.num_positions == 2000
    assert f"{output}: {recipe.digest}, from {recipe.origin.num_tokens} tokens" in done.stderr


def _file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
