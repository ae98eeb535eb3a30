"""`kvtier eval` on a tiny model in a directory, through real daemons: its rows, its tables and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_models import END_TOKEN, MAX_TOKENS, byte_tokenizer, tiny_llama
from quantised_attention import losses, plain_logits
from typer.testing import CliRunner, Result

from kvtier.cli import app
from kvtier.errors import InvalidRequestError
from kvtier.evaluate.needles import FACTS, Haystack, hide_facts

TEXT = "A lighthouse keeper counts the ships of every day, and writes them down in the evening. " * 12
NEEDLE_TOKENS = 400


def run_eval(model: Path, *arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "220"}).invoke(app, ["eval", str(model), *arguments])


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "ships.txt"
    path.write_text(TEXT)
    return path


def measured(model: Path, text_file: Path, *arguments: str) -> dict[str, Any]:
    done = run_eval(model, "--json", "--text", str(text_file), "--page-size", "16", *arguments)
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.fixture(scope="module")
def scores(model_directory: Path, text_file: Path) -> dict[str, Any]:
    arguments = ("--parts", "scores", "--recipes", "plain,search", "--contexts", "0,256", "--tokens", "128")
    return measured(model_directory, text_file, *arguments)


@pytest.fixture(scope="module")
def replies(model_directory: Path, text_file: Path) -> dict[str, Any]:
    configurations = ("--formats", "bf16,nvfp4", "--recipes", "plain", "--open-pages", "off")
    parts = ("--parts", "needles,replies", "--needle-tokens", str(NEEDLE_TOKENS))
    return measured(model_directory, text_file, *configurations, *parts)


def test_scores_are_rows_by_configuration_and_context(scores: dict[str, Any]) -> None:
    rows = scores["scores"]
    assert scores["model"] == "tiny-llama"
    assert scores["needles"] == scores["replies"] == []
    assert [(row["format"], row["recipe"], row["open_page"]) for row in rows if row["context"] == 256] == [
        ("bf16", "plain", "off"),
        ("fp8", "plain", "bf16"),
        ("fp8", "plain", "off"),
        ("nvfp4", "plain", "bf16"),
        ("nvfp4", "plain", "off"),
        ("nvfp4", "search", "bf16"),
        ("nvfp4", "search", "off"),
    ]
    assert len(rows) == 14
    tokens = byte_tokenizer()(TEXT)["input_ids"]
    exact = plain_logits(tiny_llama(), tokens)
    for row in rows:
        positions = slice(row["context"], row["context"] + 128)
        expected = np.exp(losses(exact[positions], tokens[positions.start + 1 : positions.stop + 1]).mean())
        assert row["exact_perplexity"] == pytest.approx(expected, rel=1e-4)
        assert row["perplexity"] / row["exact_perplexity"] == pytest.approx(row["perplexity_ratio"])
        for name in ("perplexity", "perplexity_ratio", "mean_kl", "top1_agreement"):
            assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]
        assert row["positions"] == 128


def test_nvfp4_is_compared_with_fp8_and_with_plain(scores: dict[str, Any]) -> None:
    rows = {(row["context"], row["format"], row["recipe"], row["open_page"]): row for row in scores["scores"]}
    for (context, page_format, recipe, open_page), row in rows.items():
        fp8, plain = rows[context, "fp8", "plain", "off"], rows.get((context, "nvfp4", "plain", open_page))
        if page_format != "nvfp4":
            assert row["kl_to_fp8"] is row["kl_to_plain"] is row["kl_less_fp8"] is None
            continue
        assert row["fp8_open_page"] == "off"
        assert row["kl_less_fp8"] == pytest.approx(row["mean_kl"] - fp8["mean_kl"])
        assert (row["kl_to_fp8"] == "within noise") == (row["kl_less_fp8_low"] <= 0 <= row["kl_less_fp8_high"])
        if recipe == "search":
            assert plain is not None
            assert row["kl_less_plain"] == pytest.approx(row["mean_kl"] - plain["mean_kl"])
        else:
            assert row["kl_to_plain"] is None
    assert rows[0, "nvfp4", "plain", "off"]["kl_to_fp8"] == "higher"


def test_needles_are_scored_on_the_cached_text(replies: dict[str, Any]) -> None:
    """Over bf16 pages as by plain transformers, but for the rounding."""
    haystack = hide_facts(byte_tokenizer(), byte_tokenizer()(TEXT)["input_ids"], NEEDLE_TOKENS)
    rows = replies["needles"]
    assert [row["format"] for row in rows] == ["bf16", "nvfp4"]
    for row in rows:
        assert row["depths"] == [fact.depth for fact in FACTS]
        assert min(row["cached_tokens"]) >= len(haystack.tokens) // 16 * 16
        assert row["found_share"] == np.mean(row["found"])
        assert row["mean_log_likelihood"] == pytest.approx(np.mean(row["log_likelihoods"]))
    expected = expected_log_likelihoods(haystack)
    over_bf16, over_nvfp4 = (np.abs(np.subtract(row["log_likelihoods"], expected)) for row in rows)
    assert over_bf16.max() < 0.1
    assert over_nvfp4.mean() > over_bf16.mean()


def expected_log_likelihoods(haystack: Haystack) -> list[float]:
    found: list[float] = []
    for question in haystack.questions:
        before = haystack.tokens + question.tokens
        logits = plain_logits(tiny_llama(), list(before + question.answer))
        found.append(-float(losses(logits[len(before) - 1 : -1], list(question.answer)).sum()))
    return found


def test_replies_are_compared_with_those_over_bf16_pages(replies: dict[str, Any]) -> None:
    (row,) = replies["replies"]
    assert (row["format"], row["num_turns"]) == ("nvfp4", 12)
    assert row["num_same"] < 12
    assert row["same_share"] < 1
    assert 0 <= row["median_difference"] < 32


def test_tables_say_the_same(model_directory: Path, text_file: Path) -> None:
    arguments = ("--text", str(text_file), "--recipes", "plain", "--open-pages", "off", "--contexts", "64")
    done = run_eval(model_directory, *arguments, "--tokens", "64", "--parts", "scores")
    assert done.exit_code == 0
    rows = [line.replace("│", " ").split() for line in done.stdout.splitlines() if line.startswith("│")]
    assert [row[:3] for row in rows] == [["bf16", "plain", "off"], ["fp8", "plain", "off"], ["nvfp4", "plain", "off"]]
    assert "64 positions behind 64 tokens of context" in done.stdout
    assert "higher" in rows[2]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--formats", "int4"], "'int4' is no page format"),
        (["--recipes", "nowhere.safetensors"], "'nowhere.safetensors' is no recipe"),
        (["--open-pages", "on"], "'on' is no open page"),
        (["--parts", "tasks"], "'tasks' is no part of an evaluation"),
        (["--contexts", "0,many"], "'0,many' are no numbers of tokens"),
        (["--contexts", "-1"], "has a negative number of tokens"),
        (["--contexts", "0,100"], "behind 0 and 100 tokens of context overlap"),
        (["--contexts", str(MAX_TOKENS)], f"tiny-llama takes {MAX_TOKENS:,}"),
        (["--contexts", "2000", "--needle-tokens", "64"], "ships.txt has 1,056 tokens and 3,025 are needed"),
        (["--text", "/nowhere.txt"], "cannot read a text from /nowhere.txt"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_cannot_be_evaluated_is_refused(
    model_directory: Path, text_file: Path, arguments: list[str], fault: str
) -> None:
    done = run_eval(model_directory, "--text", str(text_file), "--contexts", "0", "--needle-tokens", "64", *arguments)
    assert isinstance(done.exception, InvalidRequestError)
    assert fault in str(done.exception)


def test_the_text_that_comes_with_kvtier_is_long_enough_for_the_defaults() -> None:
    """A tokenizer of a large vocabulary needs about a token for every four and a half letters of English."""
    from kvtier.evaluate.corpus import load_corpus

    (tokens,) = load_corpus([], byte_tokenizer(), 4 * (6144 + 1024 + 1))
    assert END_TOKEN not in tokens
