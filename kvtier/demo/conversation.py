"""Runs the demo's conversations on a worker and measures every turn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from kvtier.client import TokensByTier
from kvtier.demo.baseline import cold_first_token_s
from kvtier.demo.script import SYSTEM_PROMPT, VISITORS
from kvtier.worker import Conversation, Request, Worker, WorkerModel

MAX_REPLY_TOKENS = 32


class Turn(NamedTuple):
    """One question and its reply.

    `expected_tokens` is what the cache must find: the whole pages of the longest beginning that an earlier turn of the
    same tenant computed.
    Times to first token are in seconds; `cold_first_token_s` is that of the same prompt without a cache.
    """

    visitor: str
    tenant: str
    number: int
    prompt_tokens: int
    expected_tokens: int
    found: TokensByTier
    computed_tokens: int
    first_token_s: float
    cold_first_token_s: float
    question: str
    reply: str

    @property
    def is_missed(self) -> bool:
        """Whether the cache did not find what it must."""
        return self.found.total < self.expected_tokens


def hold_conversations(
    worker: Worker, model: WorkerModel, tokenizer: PreTrainedTokenizerBase, page_size: int
) -> Iterator[Turn]:
    """The turns of all visitors, interleaved: everybody's first question, then everybody's second, and so on."""
    conversations = {visitor.name: Conversation(tokenizer, SYSTEM_PROMPT) for visitor in VISITORS}
    computed: list[tuple[str, tuple[int, ...]]] = []  # tenant, and tokens whose K and V were computed, of every turn
    num_turns = max(len(visitor.questions) for visitor in VISITORS)
    for index, visitor in itertools.product(range(num_turns), VISITORS):
        if index >= len(visitor.questions):
            continue
        conversation = conversations[visitor.name]
        prompt = conversation.ask(visitor.questions[index])
        cold_s = cold_first_token_s(model, prompt)
        stop_tokens = conversation.stop_tokens | _sentence_end(tokenizer)
        reply = worker.generate(Request(visitor.tenant, prompt, MAX_REPLY_TOKENS, stop_tokens))
        earlier = (tokens for tenant, tokens in computed if tenant == visitor.tenant)
        longest = max((_common_prefix(prompt, tokens) for tokens in earlier), default=0)
        computed.append((visitor.tenant, (*prompt, *reply.tokens[:-1])))
        yield Turn(
            visitor=visitor.name,
            tenant=visitor.tenant,
            number=index + 1,
            prompt_tokens=len(prompt),
            expected_tokens=longest // page_size * page_size,
            found=reply.statistics.found,
            computed_tokens=reply.statistics.computed_tokens,
            first_token_s=reply.statistics.time_to_first_token_s,
            cold_first_token_s=cold_s,
            question=visitor.questions[index],
            reply=conversation.add_reply(reply.tokens),
        )


def _sentence_end(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The full stop: small models are at their best in the first sentence of a reply."""
    return frozenset(tokenizer(".", add_special_tokens=False)["input_ids"][-1:])


def longest_conversation(tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of the longest conversation, if every reply is as long as it may be."""
    lengths: list[int] = []
    for visitor in VISITORS:
        conversation = Conversation(tokenizer, SYSTEM_PROMPT)
        for question in visitor.questions:
            lengths.append(len(conversation.ask(question)) + MAX_REPLY_TOKENS)
            conversation.add_reply([0] * MAX_REPLY_TOKENS)
    return max(lengths)


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of tokens with which both begin."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
