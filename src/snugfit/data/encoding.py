"""Tokenization of rows of text, per task.

| input              | tokens                                   | tokens in the loss                         |
|--------------------|------------------------------------------|--------------------------------------------|
| text, or two       | from the tokenizer                       | the label, or the tokens themselves        |
| tokens (words)     | the pieces of each word                  | the first piece of a word: its label       |
| messages           | of the chat template                     | the assistant's words, or all (`chat.py`)  |
| prompt, completion | of both together, and the end token      | all after the prompt                       |
| source, target     | of each                                  | the target                                 |
| input_ids          | the given ids without padding            | the labels given, or the tokens themselves |

The tokenizer truncates longer inputs, on its own side and around its special tokens. The whole input is
tokenized first, to count the lost tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, final

from snugfit.data.chat import chat_tokens, conversation_of
from snugfit.data.rows import Row, Rows, as_text
from snugfit.data.tokens import Tokenizer, Tokens
from snugfit.errors import UsageError
from snugfit.job.batch import IGNORED
from snugfit.job.job import Job, Task

ROWS_AT_ONCE = 512
"""Number of dataset rows per call of the tokenizer. It occupies a fast tokenizer's threads and needs little
memory."""

Numbered = Sequence[tuple[int, Row]]


@dataclass(frozen=True, kw_only=True)
class EncodedRow:
    """The token ids and labels of one row."""

    ids: list[int]
    """The token ids of the input."""

    labels: list[int] | None = None
    """One label per token, or the tokens of the target sequence. For rows of words, an index into
    `row_labels` per token."""

    row_labels: list[Any] = field(default_factory=list)
    """Labels in the dataset's own form, such as names of classes: one per word, or one per sequence."""

    types: list[int] | None = None
    """Token types: 1 for each token of the second text, else 0. None if the model has no token types."""

    cut: int = 0
    """Number of tokens lost by truncation."""


@final
class Encoder:
    """Encoder of the rows of one dataset for one job. Iteration yields each row's token ids and labels."""

    def __init__(
        self,
        rows: Rows,
        columns: Mapping[str, str],
        job: Job,
        tokenizer: Tokenizer | None,
        *,
        limit: int | None,
    ) -> None:
        self.rows, self.columns, self.job = rows, columns, job
        self.tokenizer = tokenizer
        """The tokenizer; None if the dataset has token ids instead of texts."""
        self.limit = limit
        """Largest number of tokens of an input. None packs texts: nothing is truncated, and the end token
        closes each text."""

    def __iter__(self) -> Iterator[EncodedRow]:
        encoders = {
            "input_ids": self._token_ids,
            "tokens": self._words,
            "messages": self._chats,
            "prompt": self._prompts,
            "source": self._targets,
            "text": self._texts,
        }
        encode = next(encoders[role] for role in encoders if role in self.columns)
        numbered = enumerate(self.rows)
        while chunk := list(islice(numbered, ROWS_AT_ONCE)):
            yield from encode(chunk)

    # ---- one method for each form of input --------------------------------------------------------------

    def _texts(self, chunk: Numbered) -> Iterator[EncodedRow]:
        texts = self._strings(chunk, "text")
        pairs = self._strings(chunk, "text_pair") if "text_pair" in self.columns else None
        for (index, row), tokens in zip(chunk, self._tokenize(texts, pairs, limit=self.limit), strict=True):
            ids = tokens.ids if self.limit is not None else self._with_end(tokens.ids)
            label = self._label_of_sequence(row, index)
            yield EncodedRow(ids=ids, row_labels=label, types=tokens.types if pairs else None, cut=tokens.cut)

    def _words(self, chunk: Numbered) -> Iterator[EncodedRow]:
        lists = [self._list_of_words(row, index) for index, row in chunk]
        tokenized = self._tokenize(lists, limit=self.limit, words=True)
        for (index, row), words, tokens in zip(chunk, lists, tokenized, strict=True):
            labels = self.rows.value(row, self.columns["label"], index)
            if not isinstance(labels, list) or len(labels) != len(words):
                count = len(labels) if isinstance(labels, list) else "no list of"
                raise UsageError(
                    f"{self.rows.location(index)}: {len(words)} words and {count} labels. Give one label "
                    "for each word."
                )
            firsts = [
                IGNORED if word is None or word == before else word
                for before, word in pairwise([None, *tokens.words])
            ]
            yield EncodedRow(ids=tokens.ids, labels=firsts, row_labels=labels, cut=tokens.cut)

    def _chats(self, chunk: Numbered) -> Iterator[EncodedRow]:
        column = self.columns["messages"]
        location = [self.rows.location(index) for index, _ in chunk]
        values = [self.rows.value(row, column, index) for index, row in chunk]
        chats = [conversation_of(value, of) for value, of in zip(values, location, strict=True)]
        for chat in chat_tokens(self._needed_tokenizer().of_transformers, chats, location):
            labels = None
            if chat.assistant is not None:
                labels = [
                    token if learned else IGNORED
                    for token, learned in zip(chat.ids, chat.assistant, strict=True)
                ]
            yield self._cut(chat.ids, labels)

    def _prompts(self, chunk: Numbered) -> Iterator[EncodedRow]:
        prompts = self._strings(chunk, "prompt")
        completions = self._strings(chunk, "completion")
        # The tokens at the boundary depend on both texts, so prompt and completion are tokenized together.
        joined = [text + other for text, other in zip(prompts, completions, strict=True)]
        alone = self._tokenize(prompts, limit=None)
        for prompt, both in zip(alone, self._tokenize(joined, limit=None), strict=True):
            ids = self._with_end(both.ids)
            shared = common_prefix(prompt.ids, ids)
            yield self._cut(ids, [IGNORED] * shared + ids[shared:])

    def _targets(self, chunk: Numbered) -> Iterator[EncodedRow]:
        sources = self._tokenize(self._strings(chunk, "source"), limit=self.limit)
        targets = self._tokenize(targets=self._strings(chunk, "target"), limit=self.job.target_length)
        for source, target in zip(sources, targets, strict=True):
            yield EncodedRow(ids=source.ids, labels=target.ids, cut=source.cut + target.cut)

    def _token_ids(self, chunk: Numbered) -> Iterator[EncodedRow]:
        return (self._checked_ids(row, index) for index, row in chunk)

    def _checked_ids(self, row: Row, index: int) -> EncodedRow:
        """Return the row's own token ids, labels and types, without the padded positions."""
        ids = self._numbers(row, self.columns["input_ids"], index)
        if late := [name for name in _TOKEN_MASKS if name in row and name not in self.rows.columns]:
            raise UsageError(
                f"{self.rows.location(index)}: it has {late[0]!r}, but the first row does not. Give it in "
                "all rows, or in none."
            )
        beside = {name: self._numbers(row, name, index) for name in _TOKEN_MASKS if name in self.rows.columns}
        labels = None
        if "label" in self.columns and self.job.task is not Task.SEQUENCE_CLASSIFICATION:
            labels = self._numbers(row, self.columns["label"], index)
        # The number of target tokens may differ from that of input tokens.
        if labels is not None and self.job.task is not Task.SEQ2SEQ_LM:
            beside["labels"] = labels
        for name, numbers in beside.items():
            if len(numbers) != len(ids):
                raise UsageError(
                    f"{self.rows.location(index)}: {len(ids)} input_ids and {len(numbers)} {name}; each "
                    "token needs one. Correct this row, or remove it."
                )
        # Padding tokens are dropped, because the collate function pads each batch.
        mask = beside.pop("attention_mask", [1] * len(ids))
        positions = [position for position, attended in enumerate(mask) if attended]
        keep = positions[: self.limit]
        cut = len(positions) - len(keep)
        cut_beside = {name: [numbers[position] for position in keep] for name, numbers in beside.items()}
        if self.job.task is Task.SEQ2SEQ_LM and labels is not None:
            cut_beside["labels"] = labels[: self.job.target_length]
            cut += len(labels) - len(cut_beside["labels"])
        ids = [ids[position] for position in keep]
        return EncodedRow(
            ids=ids if self.limit is not None else self._with_end(ids),
            labels=cut_beside.get("labels"),
            row_labels=self._label_of_sequence(row, index),
            types=cut_beside.get("token_type_ids"),
            cut=cut,
        )

    def _cut(self, ids: list[int], labels: list[int] | None) -> EncodedRow:
        """Return the first `limit` tokens with their labels, and the number of tokens that were cut."""
        first = ids[: self.limit]
        return EncodedRow(ids=first, labels=labels and labels[: self.limit], cut=len(ids) - len(first))

    def _tokenize(self, *texts: Any, **more: Any) -> list[Tokens]:
        return self._needed_tokenizer().tokens(*texts, **more)

    def _needed_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UsageError(
                f"{self.rows.source}: its rows are text, but no tokenizer was found."
                " Give one: tokenizer=FOLDER, or --tokenizer FOLDER."
            )
        return self.tokenizer

    def _with_end(self, ids: list[int]) -> list[int]:
        return ids if self.tokenizer is None else self.tokenizer.with_end(ids)

    # ---- reading one row --------------------------------------------------------------------------------

    def _label_of_sequence(self, row: Row, index: int) -> list[Any]:
        if self.job.task is not Task.SEQUENCE_CLASSIFICATION:
            return []
        return [self.rows.value(row, self.columns["label"], index)]

    def _strings(self, chunk: Numbered, role: str) -> list[str]:
        return [self.rows.text(row, self.columns[role], index) for index, row in chunk]

    def _list_of_words(self, row: Row, index: int) -> list[str]:
        column = self.columns["tokens"]
        words = self.rows.value(row, column, index)
        if not isinstance(words, list):
            raise UsageError(
                f"{self.rows.location(index)}: {column!r} is {words!r:.40}; it must be a list of words."
            )
        return [as_text(word, self.rows.location(index), column) for word in words]

    def _numbers(self, row: Row, column: str, index: int) -> list[int]:
        import numpy as np

        value = self.rows.value(row, column, index)
        try:
            numbers = np.asarray(value)
        except ValueError:  # raised for lists of several lengths
            numbers = np.asarray(None)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            raise UsageError(
                f"{self.rows.location(index)}: {column!r} is {value!r:.40}; it must be a list of numbers."
            )
        # `Ragged` stores integers of 32 bits.
        if numbers.size and not -_MAX_TOKEN_ID <= numbers.min() <= numbers.max() < _MAX_TOKEN_ID:
            raise UsageError(
                f"{self.rows.location(index)}: {column!r} contains {numbers.max()}, which is not a token. "
                "Tokens are whole numbers from 0."
            )
        checked: list[int] = numbers.tolist()
        return checked


_TOKEN_MASKS = ("attention_mask", "token_type_ids")
_MAX_TOKEN_ID = 1 << 31


def common_prefix(first: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences.

    The last tokens of a prompt alone may differ from those of the prompt with its completion. The completion
    begins at the first difference.
    """
    return next(
        (position for position, (a, b) in enumerate(zip(first, other, strict=False)) if a != b),
        min(len(first), len(other)),
    )
