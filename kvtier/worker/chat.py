"""Conversations as token ids, so that every prompt extends the one before it exactly.

A reply is kept as the tokens that the model generated and is never tokenised again: its text may well tokenise to other
ids, and then the cached prefix would end there.
"""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from kvtier.errors import InvalidRequestError

_PLACEHOLDER = "reply"  # stands for a reply where only what the chat template puts around it is wanted


class Conversation:
    """One conversation with an instruct model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str) -> None:
        """`system` is the system prompt, the shared beginning of all conversations that have the same.

        Raises `InvalidRequestError` when the tokenizer has no chat template.
        """
        if tokenizer.chat_template is None:
            raise InvalidRequestError("the model has no chat template; give an instruct model")
        self._tokenizer = tokenizer
        self._system = {"role": "system", "content": system}
        self._tokens: list[int] = []

    @property
    def stop_tokens(self) -> frozenset[int]:
        """The token that ends a reply."""
        return frozenset({self._tokenizer.eos_token_id})

    def ask(self, question: str) -> tuple[int, ...]:
        """The prompt for the next reply: everything so far, then `question`."""
        user = {"role": "user", "content": question}
        if not self._tokens:
            self._tokens = self._tokenize(self._render([self._system, user]))
            return tuple(self._tokens)
        following = self._tokenize(self._text_behind_reply(user))
        if following[0] == self._tokens[-1] and following[0] in self.stop_tokens:
            del following[0]  # the model ended its reply with the token that the template puts there
        self._tokens += following
        return tuple(self._tokens)

    def add_reply(self, tokens: Iterable[int]) -> str:
        """Takes the generated tokens of the last question's reply; their text."""
        reply = list(tokens)
        self._tokens += reply
        return str(self._tokenizer.decode(reply, skip_special_tokens=True)).strip()

    def _text_behind_reply(self, user: dict[str, str]) -> str:
        """What the template puts between a reply and the next one, with the next question in it."""
        asked = [self._system, {"role": "user", "content": _PLACEHOLDER}]
        before = self._render(asked) + _PLACEHOLDER
        text = self._render([*asked, {"role": "assistant", "content": _PLACEHOLDER}, user])
        if not text.startswith(before):
            raise InvalidRequestError("the chat template rewrites earlier turns, so no prompt extends the one before")
        return text.removeprefix(before)

    def _render(self, messages: list[dict[str, str]]) -> str:
        return str(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    def _tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
