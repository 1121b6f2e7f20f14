"""Conversations: the tokens of the chat template, and the choice of the trained ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from small_models import small_job
from small_tokenizers import tokenizer
from snugfit.data.row_sources import read_rows
from snugfit.data.samples import Samples, samples_of
from snugfit.errors import UsageError
from snugfit.frontends.own import train
from snugfit.training.journal import read_journal

ONE_MESSAGE, SPACE = "{{ '- ' + message['content'] + ' .' }}", "{{ ' ' }}"
PLAIN = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('no system here') }}{% endif %}" + ONE_MESSAGE + SPACE + "{% endfor %}"
)
MARKED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}"
    + ONE_MESSAGE
    + "{% endgeneration %}{% else %}"
    + ONE_MESSAGE
    + "{% endif %}"
    + SPACE
    + "{% endfor %}"
)
CHAT = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four five"},
]
OLDER = [
    {"from": {"user": "human", "assistant": "gpt"}[message["role"]], "value": message["content"]}
    for message in CHAT
]

# one 7 two 8 three 9 four 10 five 11 . 17 - 18
WORDS = [18, 7, 17, 18, 8, 17, 18, 9, 17, 18, 10, 11, 17]
SAID = [-100] * 3 + [18, 8, 17] + [-100] * 3 + [18, 10, 11, 17]


def made(chats: list[Any], template: str | None = MARKED, *, length: int = 16, **more: Any) -> Samples:
    words = tokenizer("gpt2")
    words.chat_template = template
    job = replace(small_job("gpt2", 1), sequence_length=length)
    rows = [chat if isinstance(chat, dict) else {"messages": chat} for chat in chats]
    return samples_of(read_rows(rows), job, words, **more)


def test_only_the_assistant_is_learned_where_the_template_marks_it() -> None:
    samples = made([CHAT, CHAT[:2]])
    assert list(samples) == [
        {"input_ids": WORDS, "labels": SAID},
        {"input_ids": WORDS[:6], "labels": SAID[:6]},
    ]
    assert samples.notes == ("The model learns only the assistant's words, which the chat template marks.",)


def test_all_is_learned_and_told_where_it_does_not() -> None:
    samples = made([CHAT], PLAIN)
    assert list(samples) == [{"input_ids": WORDS, "labels": WORDS}]
    (note,) = samples.notes
    assert "learns all words of the conversations" in note


def test_tools_are_said_to_be_left_out() -> None:
    _, note = made([{"messages": CHAT, "tools": [{"name": "add"}]}]).notes
    assert "'tools' is ignored" in note


def test_the_older_manner_means_the_same() -> None:
    assert list(made([{"conversations": OLDER}])) == list(made([CHAT]))


def test_what_is_too_long_is_cut_and_what_teaches_nothing_left_out() -> None:
    samples = made([CHAT, [*CHAT[:1] * 3, CHAT[1]]], length=8)
    assert list(samples) == [{"input_ids": WORDS[:8], "labels": SAID[:8]}]
    assert (samples.cut, samples.cut_tokens, samples.left_out) == (2, 5 + 4, 1)


MISTAKES: dict[str, tuple[Any, str]] = {
    "no list": ("one", "row 2: a conversation must be a list of messages"),
    "nothing": (None, r"not nothing \(null\)"),
    "no messages": ([], r"not \[\]"),
    "no content": (
        [{"role": "user"}],
        "row 2, message 1: it has 'role'; a message needs a role and a content",
    ),
    "a number": ([CHAT[0], {"role": "user", "content": 7}], "row 2, message 2: 'content' is 7"),
    "a stranger": ([{"from": "bing", "value": "one"}], "from 'bing'; it must be one of human, user"),
    "refused": ([{"role": "system", "content": "one"}], "row 2: the chat template refuses.*no system here"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_no_conversation_is_told_with_its_row(name: str) -> None:
    wrong, says = MISTAKES[name]
    with pytest.raises(UsageError, match=says):
        made([CHAT, {"messages": wrong}], PLAIN)


def test_without_a_template_the_cure_is_told() -> None:
    with pytest.raises(UsageError, match=r"this tokenizer has no chat template.*chat_template\.jinja"):
        made([CHAT], None)
    with pytest.raises(UsageError, match=r"no tokenizer was found.*--tokenizer FOLDER"):
        samples_of(read_rows([{"messages": CHAT}]), small_job("gpt2", 1), None)
    with pytest.raises(
        UsageError, match=r"Packing works for causal-lm on plain text\. With prompts, messages"
    ):
        made([CHAT], pack=True)


@pytest.mark.whole
def test_conversations_are_trained_on(tmp_path: Path) -> None:
    words = tokenizer("gpt2")
    words.chat_template = MARKED
    words.save_pretrained(str(tmp_path / "words"))
    job = replace(small_job("gpt2", 1), batch_size=2)
    done = train(
        job,
        "micro_batches(2)",
        [{"messages": CHAT}, {"messages": CHAT[:2]}, {"messages": CHAT[2:]}],
        tokenizer=tmp_path / "words",
        output_dir=tmp_path / "out",
        max_steps=2,
        device="cpu",
    )
    assert done.step == 2
    told = [event["text"] for event in read_journal(tmp_path / "out") if event["event"] == "note"]
    assert told == ["The model learns only the assistant's words, which the chat template marks."]
