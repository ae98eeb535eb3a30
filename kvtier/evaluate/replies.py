"""Greedy replies in conversations of several turns, beside those over bf16 pages.

Every turn goes on from the reference's replies, so all configurations are asked the same, and one turn that goes
another way does not count again in the next. The history of a turn comes from the cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from kvtier.demo.script import SYSTEM_PROMPT, VISITORS
from kvtier.worker import Conversation, Request, Worker

NAMESPACE = "conversations"
MAX_REPLY_TOKENS = 32

_TRANSCRIPT = (
    "{{ bos_token }}{% for message in messages %}{{ message.role + ':\n' + message.content + '\n\n' }}{% endfor %}"
    "{{ 'assistant:\n' if add_generation_prompt }}"
)


class Turn(NamedTuple):
    """A prompt and its reply, both as token ids."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]


class Agreement(NamedTuple):
    """Replies of one configuration beside the reference's.

    Attributes:
        num_turns, num_same: replies, and those that are the same to their end.
        same_share: tokens before the first difference of each reply, over all tokens of the reference.
        median_difference: the token at which those that differ do so, counted from 0; None when none does.
    """

    num_turns: int
    num_same: int
    same_share: float
    median_difference: float | None


def with_chat_template(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """`tokenizer`, with a plain transcript as its chat template when it has none, as those of base models."""
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _TRANSCRIPT
    return tokenizer


def hold_reference_conversations(worker: Worker, tokenizer: PreTrainedTokenizerBase) -> list[list[Turn]]:
    """Rounds of turns: everybody's first, then everybody's second, and so on."""
    conversations = [Conversation(tokenizer, SYSTEM_PROMPT) for _ in VISITORS]
    stop_tokens = conversations[0].stop_tokens
    rounds: list[list[Turn]] = []
    for questions in zip(*(visitor.questions for visitor in VISITORS), strict=False):
        prompts = [conversation.ask(question) for conversation, question in zip(conversations, questions, strict=True)]
        replies = _replies(worker, prompts, stop_tokens)
        for conversation, reply in zip(conversations, replies, strict=True):
            conversation.add_reply(reply)
        rounds.append([Turn(*turn) for turn in zip(prompts, replies, strict=True)])
    return rounds


def agreement(worker: Worker, tokenizer: PreTrainedTokenizerBase, reference: Sequence[Sequence[Turn]]) -> Agreement:
    """The same prompts through `worker`, round by round."""
    stop_tokens = Conversation(tokenizer, SYSTEM_PROMPT).stop_tokens
    pairs: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for turns in reference:
        replies = _replies(worker, [turn.prompt for turn in turns], stop_tokens)
        pairs += [(turn.reply, reply) for turn, reply in zip(turns, replies, strict=True)]
    return summarise(pairs)


def summarise(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Agreement:
    """Of pairs of the reference's reply and another one's."""
    differences = [_first_difference(*pair) for pair in pairs]
    num_tokens = sum(len(reference) for reference, _ in pairs)
    same = sum(
        len(reference) if difference is None else difference
        for (reference, _), difference in zip(pairs, differences, strict=True)
    )
    differing = [difference for difference in differences if difference is not None]
    return Agreement(
        num_turns=len(pairs),
        num_same=len(pairs) - len(differing),
        same_share=same / num_tokens,
        median_difference=float(statistics.median(differing)) if differing else None,
    )


def _replies(worker: Worker, prompts: Sequence[tuple[int, ...]], stop_tokens: frozenset[int]) -> list[tuple[int, ...]]:
    replies = worker.run(Request(NAMESPACE, prompt, MAX_REPLY_TOKENS, stop_tokens) for prompt in prompts)
    for reply in replies:
        if reply.error:
            raise reply.error
    return [reply.tokens for reply in replies]


def _first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Where the two part, or where the shorter one ends; None when they are the same."""
    if list(first) == list(second):
        return None
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))
