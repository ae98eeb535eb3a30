"""Retrieval at depth: facts hidden in a long text are asked for, one after the other, on the cached text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from kvtier.worker import Request, Worker, WorkerModel
from kvtier.worker.attention import ModelBatch

NAMESPACE = "needles"


class Fact(NamedTuple):
    """What is hidden at `depth`, a share of the text; `value` follows `statement` behind a blank."""

    depth: float
    statement: str
    value: str


FACTS = (
    Fact(0.1, "The number of the baker's bicycle is", "4817"),
    Fact(0.3, "The code of the iron safe is", "2956"),
    Fact(0.5, "The doctor's telephone number is", "7302"),
    Fact(0.7, "The size of the orchard in square metres is", "6149"),
    Fact(0.9, "The number of books in the school library is", "3085"),
)


class Haystack(NamedTuple):
    """A text of `filler_tokens` with all `FACTS` in it, and a question for each, as token ids."""

    filler_tokens: int
    tokens: tuple[int, ...]
    questions: tuple[Question, ...]


class Question(NamedTuple):
    """`tokens` lead to `answer`, when they follow the haystack."""

    depth: float
    tokens: tuple[int, ...]
    answer: tuple[int, ...]


class Finding(NamedTuple):
    """What came of a question.

    Attributes:
        is_found: whether the greedy reply is the answer.
        log_likelihood: of the answer, in nats.
        cached_tokens: of haystack and question, those that the cache had.
    """

    depth: float
    is_found: bool
    log_likelihood: float
    cached_tokens: int


@dataclass(frozen=True)
class ObservedModel(WorkerModel):
    """A model that keeps the logits of every forward pass of one sequence."""

    observed: list[torch.Tensor] = field(default_factory=list)

    def forward(self, batch: ModelBatch, rows: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().forward(batch, rows)
        self.observed.append(logits[-1])
        return logits


def hide_facts(tokenizer: PreTrainedTokenizerBase, filler: Sequence[int], num_tokens: int) -> Haystack:
    """The first `num_tokens` of `filler`, with every fact on a line of its own."""
    tokens: list[int] = []
    placed = 0
    for fact in FACTS:
        end = int(fact.depth * num_tokens)
        line = _tokenize(tokenizer, f"\n\n{fact.statement} {fact.value}.\n\n")
        tokens += [*filler[placed:end], *line]
        placed = end
    tokens += filler[placed:num_tokens]
    return Haystack(num_tokens, tuple(tokens), tuple(_question(tokenizer, fact) for fact in FACTS))


def find_needles(worker: Worker, model: ObservedModel, haystack: Haystack) -> Iterator[Finding]:
    """Lets the cache have the haystack, then asks for one fact after the other; `worker` runs `model`."""
    worker.generate(Request(NAMESPACE, haystack.tokens, 1))
    for question in haystack.questions:
        yield _ask(worker, model, haystack, question)


def _ask(worker: Worker, model: ObservedModel, haystack: Haystack, question: Question) -> Finding:
    """Replies greedily; where the reply leaves the answer, it begins anew behind the answer's next token."""
    prompt = haystack.tokens + question.tokens
    given, log_likelihood, is_found, cached_tokens = 0, 0.0, True, 0
    while given < len(question.answer):
        model.observed.clear()
        request = Request(NAMESPACE, prompt + question.answer[:given], len(question.answer) - given)
        reply = worker.generate(request)
        cached_tokens = reply.statistics.found.total
        for logits, token in zip(model.observed[-len(reply.tokens) :], reply.tokens, strict=True):
            expected = question.answer[given]
            log_likelihood += float(logits.double().log_softmax(-1)[expected])
            given += 1
            if token != expected:
                is_found = False
                break
    return Finding(question.depth, is_found, log_likelihood, cached_tokens)


def _question(tokenizer: PreTrainedTokenizerBase, fact: Fact) -> Question:
    """Cut where the tokens with and without the value part: a tokenizer may join the value with what precedes it."""
    asked = _tokenize(tokenizer, f"\n\n{fact.statement}")
    answered = _tokenize(tokenizer, f"\n\n{fact.statement} {fact.value}")
    pairs = enumerate(zip(asked, answered, strict=False))
    cut = next((index for index, (one, other) in pairs if one != other), len(asked))
    return Question(fact.depth, tuple(answered[:cut]), tuple(answered[cut:]))


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
