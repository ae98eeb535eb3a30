"""How replies are compared."""

from __future__ import annotations

import pytest
from evaluation_models import byte_tokenizer

from kvtier.evaluate.replies import Agreement, summarise, with_chat_template
from kvtier.worker import Conversation


def test_summary() -> None:
    """The same, one that differs at its third token, one that ends early, and one that goes on for longer."""
    pairs = [([1, 2, 3, 4], [1, 2, 3, 4]), ([1, 2, 3, 4], [1, 2, 9, 4]), ([5, 6, 7], [5]), ([8], [8, 9])]
    assert summarise(pairs) == Agreement(4, 1, (4 + 2 + 1 + 1) / 12, median_difference=1.0)


def test_summary_without_a_difference() -> None:
    assert summarise([([1], [1])]) == Agreement(1, 1, 1.0, None)


def test_base_models_speak_in_a_transcript() -> None:
    """Whose turns extend each other, as those of a chat template of the model's own do."""
    tokenizer = with_chat_template(byte_tokenizer())
    conversation = Conversation(tokenizer, "Be kind.")
    first = conversation.ask("Who?")
    conversation.add_reply(tokenizer("I.")["input_ids"])
    second = conversation.ask("Why?")
    assert second[: len(first)] == first
    assert tokenizer.decode(second) == (
        "system:\nBe kind.\n\nuser:\nWho?\n\nassistant:\nI.\n\nuser:\nWhy?\n\nassistant:\n"
    )


def test_a_template_of_the_models_own_stays() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert with_chat_template(tokenizer).chat_template == "{{ messages[0].content }}"


@pytest.mark.parametrize(("first", "second"), [([1, 2], [1, 2]), ([], [])])
def test_the_same_replies_agree_wholly(first: list[int], second: list[int]) -> None:
    agreement = summarise([(first, second), ([7], [7])])
    assert (agreement.num_same, agreement.same_share) == (2, 1.0)
