"""Conversations as token ids: every prompt extends the one before it, and replies are never tokenised again."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvtier.errors import InvalidRequestError
from kvtier.worker.chat import Conversation

WORDS = [
    "<unk>",
    "<s>",
    "</s>",
    "system",
    "user",
    "assistant",
    "be",
    "kind",
    "hello",
    "who",
    "are",
    "you",
    "reply",
    "me",
]
TEMPLATE = (
    "{% for message in messages %}<s> {{ message['role'] }} {{ message['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)
FORGETFUL = "{{ messages[0]['content'] }} {{ messages[-1]['content'] }} assistant "


def ids(text: str) -> tuple[int, ...]:
    return tuple(WORDS.index(word) for word in text.split())


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="<unk>", chat_template=template)


def test_a_prompt_extends_the_one_before_it() -> None:
    conversation = Conversation(tokenizer(), "be kind")
    first = conversation.ask("hello")
    assert first == ids("<s> system be kind </s> <s> user hello </s> <s> assistant")
    assert conversation.add_reply(ids("hello you </s>")) == "hello you"
    second = conversation.ask("who are you")
    assert second == first + ids("hello you </s> <s> user who are you </s> <s> assistant")


def test_a_reply_cut_short_is_closed_by_the_template() -> None:
    conversation = Conversation(tokenizer(), "be kind")
    first = conversation.ask("hello")
    conversation.add_reply(ids("hello"))
    assert conversation.ask("who") == first + ids("hello </s> <s> user who </s> <s> assistant")


def test_a_reply_keeps_its_own_tokens() -> None:
    """`<unk>` decodes to text that tokenises to other ids; the conversation goes on with what was generated."""
    conversation = Conversation(tokenizer(), "be kind")
    first = conversation.ask("hello")
    conversation.add_reply((0, 0, 8))
    assert conversation.ask("me")[len(first) : len(first) + 3] == (0, 0, 8)


def test_stop_token_ends_replies() -> None:
    assert Conversation(tokenizer(), "be kind").stop_tokens == {2}


def test_a_model_without_chat_template_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        Conversation(tokenizer(template=None), "be kind")


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    conversation = Conversation(tokenizer(FORGETFUL), "be kind")
    conversation.ask("hello")
    conversation.add_reply(ids("me"))
    with pytest.raises(InvalidRequestError, match="rewrites earlier turns"):
        conversation.ask("who")
