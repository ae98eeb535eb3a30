"""`kvtier eval`: the same texts and prompts under every configuration."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerBase

from kvtier.demo.conversation import longest_conversation
from kvtier.demo.script import VISITORS
from kvtier.errors import InvalidRequestError
from kvtier.evaluate.configurations import Configuration, all_configurations, parse_choices, parse_recipes
from kvtier.evaluate.corpus import load_corpus
from kvtier.evaluate.needles import Finding, Haystack, ObservedModel, find_needles, hide_facts
from kvtier.evaluate.replies import Turn, agreement, hold_reference_conversations, with_chat_template
from kvtier.evaluate.rows import NeedleRow, ReplyRow, ScoreRow, score_rows
from kvtier.evaluate.scoring import check_contexts, score_texts
from kvtier.launch import daemon_process
from kvtier.pages.layout import PageFormat
from kvtier.pages.recipe import PLAIN
from kvtier.worker import OpenPage, Worker, WorkerModel, WorkerOptions, connect_worker, load_model, load_tokenizer

REFERENCE = Configuration(PageFormat.BF16, PLAIN.name, PLAIN, OpenPage.OFF)
_LEAST_PAGES = 16  # of a pool
_QUESTION_TOKENS = 384  # room for the facts in a haystack, and for a question and its answer behind it


class Part(StrEnum):
    """What is measured."""

    SCORES = "scores"
    NEEDLES = "needles"
    REPLIES = "replies"


@dataclass(frozen=True)
class EvaluationOptions:
    """What to evaluate, lists as a user writes them: by comma.

    Args:
        formats, recipes, open_pages: the configurations.
        parts: of `Part`.
        contexts: tokens before the measured positions.
        num_tokens: measured positions behind each context.
        needle_tokens: lengths of the texts in which facts are hidden.
        texts: files; none is the text that comes with kvtier.
        page_size: tokens of a page.
    """

    formats: str = "bf16,fp8,nvfp4"
    recipes: str = "plain,search,shipped"
    open_pages: str = "bf16,off"
    parts: str = "scores,needles"
    contexts: str = "0,6144"
    num_tokens: int = 1024
    needle_tokens: str = "512,2048"
    texts: tuple[Path, ...] = ()
    page_size: int = 64


class Evaluation(NamedTuple):
    """What was measured of a model; parts that were not asked for are empty."""

    model: str
    revision: str
    scores: list[ScoreRow]
    needles: list[NeedleRow]
    replies: list[ReplyRow]

    def to_json(self) -> dict[str, Any]:
        """Rows by part."""
        parts = {part.value: getattr(self, part.value) for part in Part}
        rows = {name: [row.to_json() for row in rows] for name, rows in parts.items()}
        return {"model": self.model, "revision": self.revision, **rows}


def evaluate(directory: Path, options: EvaluationOptions, console: Console) -> Evaluation:
    """Measures the model in `directory`; progress goes to `console`.

    Raises `InvalidRequestError` before anything is measured when an option is unknown, a text is too short or a
    context too long for the model.
    """
    formats = parse_choices(PageFormat, options.formats, "page format")
    open_pages = parse_choices(OpenPage, options.open_pages, "open page")
    parts = parse_choices(Part, options.parts, "part of an evaluation")
    contexts, needle_tokens = _parse_lengths(options.contexts), _parse_lengths(options.needle_tokens)
    check_contexts(contexts, options.num_tokens)
    model = load_model(directory)
    configurations = all_configurations(formats, parse_recipes(options.recipes, model), open_pages)
    tokenizer = with_chat_template(load_tokenizer(directory))
    scored_tokens = max(contexts) + options.num_tokens if Part.SCORES in parts else 0
    filler_tokens = max(needle_tokens) if Part.NEEDLES in parts else 0
    num_at_once = max(scored_tokens, filler_tokens + _QUESTION_TOKENS)
    if num_at_once > model.max_tokens:
        raise InvalidRequestError(
            f"{num_at_once:,} tokens are needed at once and {model.name} takes {model.max_tokens:,}; ask for shorter "
            "--contexts or --needle-tokens"
        )
    corpus = load_corpus(options.texts, tokenizer, max(scored_tokens + 1, filler_tokens))
    scores: list[ScoreRow] = []
    needles: list[NeedleRow] = []
    replies: list[ReplyRow] = []
    with _progress(console) as progress:
        if Part.SCORES in parts:
            scores = _score(model, configurations, corpus, contexts, options, progress)
        if Part.NEEDLES in parts:
            haystacks = [hide_facts(tokenizer, corpus[0], length) for length in needle_tokens]
            needles = _search_needles(model, configurations, haystacks, options.page_size, progress)
        if Part.REPLIES in parts:
            replies = _compare_replies(model, configurations, tokenizer, options.page_size, progress)
    return Evaluation(model.name, model.revision, scores, needles, replies)


def _score(
    model: WorkerModel,
    configurations: Sequence[Configuration],
    corpus: Sequence[Sequence[int]],
    contexts: Sequence[int],
    options: EvaluationOptions,
    progress: Progress,
) -> list[ScoreRow]:
    num_computed = len(corpus) * (max(contexts) + options.num_tokens) * (1 + len(configurations))
    task = progress.add_task("scoring, tokens", total=num_computed)
    scores = score_texts(
        model,
        configurations,
        corpus,
        contexts,
        options.num_tokens,
        options.page_size,
        lambda count: progress.advance(task, count),
    )
    return [row for of_context in scores for row in score_rows(configurations, of_context)]


def _search_needles(
    model: WorkerModel,
    configurations: Sequence[Configuration],
    haystacks: Sequence[Haystack],
    page_size: int,
    progress: Progress,
) -> list[NeedleRow]:
    task = progress.add_task("needles, texts", total=len(configurations) * len(haystacks))
    observed = ObservedModel(**vars(model))
    rows: list[NeedleRow] = []
    for configuration in configurations:
        num_tokens = sum(len(haystack.tokens) + _QUESTION_TOKENS for haystack in haystacks)
        with _worker(observed, configuration, page_size, num_tokens) as worker:
            for haystack in haystacks:
                findings: list[Finding] = list(find_needles(worker, observed, haystack))
                rows.append(NeedleRow(configuration, haystack.filler_tokens, findings))
                progress.advance(task)
    return rows


def _compare_replies(
    model: WorkerModel,
    configurations: Sequence[Configuration],
    tokenizer: PreTrainedTokenizerBase,
    page_size: int,
    progress: Progress,
) -> list[ReplyRow]:
    num_tokens = len(VISITORS) * (longest_conversation(tokenizer) + page_size)
    others = [configuration for configuration in configurations if configuration != REFERENCE]
    task = progress.add_task("conversations, configurations", total=1 + len(others))
    reference: list[list[Turn]] = []
    with _worker(model, REFERENCE, page_size, num_tokens) as worker:
        reference = hold_reference_conversations(worker, tokenizer)
    progress.advance(task)
    rows: list[ReplyRow] = []
    for configuration in others:
        with _worker(model, configuration, page_size, num_tokens) as worker:
            rows.append(ReplyRow(configuration, agreement(worker, tokenizer, reference)))
        progress.advance(task)
    return rows


@contextmanager
def _worker(model: WorkerModel, configuration: Configuration, page_size: int, num_tokens: int) -> Iterator[Worker]:
    """A worker on a daemon of its own, whose device pool has room for `num_tokens`."""
    options = WorkerOptions(open_page=configuration.open_page)
    page_format, recipe = configuration.page_format, configuration.recipe
    identity = model.identity(page_format, page_size, options.prefill_attends, options.open_page, recipe)
    page_bytes = identity.layout.page_bytes
    num_pages = max(_LEAST_PAGES, num_tokens // page_size + 1)
    pools = {"device_bytes": num_pages * page_bytes, "host_bytes": _LEAST_PAGES * page_bytes}
    settings = {"device": "shared-memory", "redis": "none", **pools}  # the worker runs on the CPU
    threads = torch.get_num_threads()
    # The daemon needs a core too: threads of a forward pass that share theirs with it take many times longer.
    torch.set_num_threads(max(1, min(threads, (os.cpu_count() or 2) // 2)))
    try:
        with (
            tempfile.TemporaryDirectory(prefix="kvtier-eval-") as folder,
            daemon_process(Path(folder), **settings) as daemon,
            connect_worker(daemon.address, model, page_format, page_size, options, recipe=recipe) as worker,
        ):
            yield worker
    finally:
        torch.set_num_threads(threads)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


def _parse_lengths(text: str) -> list[int]:
    """Numbers of tokens by comma, each once; raises `InvalidRequestError` for anything else."""
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidRequestError(f"{text!r} are no numbers of tokens; write them as 0,6144") from error
    if min(lengths) < 0:
        raise InvalidRequestError(f"{text!r} has a negative number of tokens")
    return sorted(set(lengths))
