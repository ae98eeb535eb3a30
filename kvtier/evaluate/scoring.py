"""Next-token distributions of every configuration on the same texts, beside those of the unquantised model.

All configurations go through a text together, chunk by chunk, so that the logits of one chunk are all that is kept.
With `PrefillAttends.QUANTIZED` every token of a chunk sees what a decode at its position would see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from kvtier.errors import InvalidRequestError
from kvtier.evaluate.configurations import Configuration
from kvtier.evaluate.divergence import PositionScores, compare, concatenate
from kvtier.evaluate.yardstick import ExactContext
from kvtier.worker import PrefillAttends, WorkerModel
from kvtier.worker.batch import PackedBatch, PagedKv
from kvtier.worker.chunk import Chunk
from kvtier.worker.open_pages import OpenPageStore

CHUNK_TOKENS = 512
_CHUNK_LOGITS = 1 << 26  # 256 MiB in fp32, for the model and for a configuration each
_SLOT = 0


class Context(Protocol):
    """One sequence on its way through the model."""

    def logits(self, tokens: Sequence[int], start: int, wanted: bool) -> torch.Tensor:
        """Computes `tokens`, which stand at `start` and following, right behind those before.

        Logits `(tokens, vocabulary)`; none, `(0, vocabulary)`, unless they are `wanted`.
        """
        ...


class PagedContext:
    """A sequence in pages of its own."""

    def __init__(self, model: WorkerModel, configuration: Configuration, num_tokens: int, page_size: int) -> None:
        """With room for `num_tokens`."""
        layout = model.identity(
            configuration.page_format,
            page_size,
            PrefillAttends.QUANTIZED,
            configuration.open_page,
            configuration.recipe,
        ).layout
        self._model = model
        self._page_numbers = range(-(-num_tokens // page_size))
        memory = np.zeros((len(self._page_numbers), layout.page_bytes), dtype=np.uint8)
        self._pages = PagedKv.of(memory, layout, configuration.recipe, model.dtype)
        self._open_pages = OpenPageStore(layout, configuration.open_page, num_slots=_SLOT + 1)

    def logits(self, tokens: Sequence[int], start: int, wanted: bool) -> torch.Tensor:
        """See `Context`."""
        chunk = Chunk(tokens, start, self._page_numbers, _SLOT)
        batch = PackedBatch([chunk], self._pages, self._open_pages, PrefillAttends.QUANTIZED)
        return self._model.forward(batch, torch.arange(len(tokens) if wanted else 0))


class Span(NamedTuple):
    """Positions `start` to `end - 1`, and the context whose scores they count for, if they do."""

    start: int
    end: int
    context: int | None


class TextScores(NamedTuple):
    """Scores of every configuration, in their order, of the positions behind `context` tokens of each text."""

    context: int
    configurations: list[PositionScores]
    lengths: list[int]


def check_contexts(contexts: Sequence[int], num_tokens: int) -> None:
    """Raises `InvalidRequestError` when the measured positions of two contexts overlap."""
    for first, second in zip(sorted(contexts), sorted(contexts)[1:], strict=False):
        if second - first < num_tokens:
            raise InvalidRequestError(
                f"the {num_tokens} tokens behind {first} and {second} tokens of context overlap; ask for fewer tokens"
            )


def score_texts(
    model: WorkerModel,
    configurations: Sequence[Configuration],
    texts: Sequence[Sequence[int]],
    contexts: Sequence[int],
    num_tokens: int,
    page_size: int,
    on_computed: Callable[[int], None],
) -> list[TextScores]:
    """Scores of `num_tokens` positions behind each of `contexts` of every text.

    A text has more than `max(contexts) + num_tokens` token ids. `on_computed` hears how many tokens were computed, for
    progress.
    """
    found: dict[int, list[list[PositionScores]]] = {context: [] for context in contexts}
    end = max(contexts) + num_tokens
    for text in texts:
        exact = ExactContext(model, end)
        paged = [PagedContext(model, configuration, end, page_size) for configuration in configurations]
        spans = plan_spans(contexts, num_tokens, max(1, min(CHUNK_TOKENS, _CHUNK_LOGITS // model.vocab_size)))
        parts: dict[int, list[list[PositionScores]]] = {context: [] for context in contexts}
        for span in spans:
            scores = _score_span(exact, paged, text, span, on_computed)
            if span.context is not None:
                parts[span.context].append(scores)
        for context, of_spans in parts.items():
            found[context].append(_joined(of_spans))
    return [TextScores(context, _joined(of_texts), [num_tokens] * len(texts)) for context, of_texts in found.items()]


def plan_spans(contexts: Sequence[int], num_tokens: int, chunk_tokens: int) -> list[Span]:
    """Chunks of at most `chunk_tokens` up to the last measured position, each measured as a whole or not at all."""
    end = max(contexts) + num_tokens
    measured = {position for context in contexts for position in (context, context + num_tokens)}
    edges = sorted({*range(0, end, chunk_tokens), *measured})
    spans: list[Span] = []
    for start, stop in zip(edges, edges[1:], strict=False):
        owners = (context for context in contexts if context <= start < context + num_tokens)
        spans.append(Span(start, stop, next(owners, None)))
    return spans


def _score_span(
    exact: Context,
    paged: Sequence[Context],
    text: Sequence[int],
    span: Span,
    on_computed: Callable[[int], None],
) -> list[PositionScores]:
    tokens, wanted = text[span.start : span.end], span.context is not None
    following = torch.tensor(text[span.start + 1 : span.end + 1])
    exact_logits = exact.logits(tokens, span.start, wanted)
    on_computed(len(tokens))
    scores: list[PositionScores] = []
    for context in paged:
        logits = context.logits(tokens, span.start, wanted)
        if wanted:
            scores.append(compare(exact_logits, logits, following))
        on_computed(len(tokens))
    return scores


def _joined(parts: Sequence[Sequence[PositionScores]]) -> list[PositionScores]:
    """By configuration, the parts one behind the other."""
    return [concatenate(of_configuration) for of_configuration in zip(*parts, strict=True)]
