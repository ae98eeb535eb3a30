"""Where facts are hidden, and what is asked for them."""

from __future__ import annotations

from evaluation_models import byte_tokenizer, random_text

from kvtier.evaluate.needles import FACTS, hide_facts


def test_every_fact_stands_at_its_depth() -> None:
    filler = random_text(2000)
    haystack = hide_facts(byte_tokenizer(), filler, 1000)
    text = bytes_of(haystack.tokens)
    hidden = [bytes_of(byte_tokenizer()(f"\n\n{fact.statement} {fact.value}.\n\n")["input_ids"]) for fact in FACTS]
    assert haystack.filler_tokens == 1000
    before = 0
    for fact, line in zip(FACTS, hidden, strict=True):
        assert text.index(line) == fact.depth * 1000 + before
        before += len(line)
    without = text
    for line in hidden:
        without = without.replace(line, b"")
    assert without == bytes_of(filler[:1000])


def test_questions_lead_to_the_answers() -> None:
    tokenizer = byte_tokenizer()
    haystack = hide_facts(tokenizer, random_text(200), 100)
    assert [tokenizer.decode(question.tokens + question.answer) for question in haystack.questions] == [
        f"\n\n{fact.statement} {fact.value}" for fact in FACTS
    ]
    assert [tokenizer.decode(question.answer) for question in haystack.questions] == [
        f" {fact.value}" for fact in FACTS
    ]


def bytes_of(tokens: list[int] | tuple[int, ...]) -> bytes:
    return bytes(tokens)
