"""From rows of text to rows of tokens: what each task does with a tokenizer.

| input              | tokens                               | a loss looks at                             |
|--------------------|--------------------------------------|---------------------------------------------|
| text, or two       | as the tokenizer makes them          | the label, or the tokens themselves         |
| tokens (words)     | the pieces of each word              | the first piece of a word: its label        |
| messages           | of the chat template                 | the assistant's words, or all (`chat.py`)   |
| prompt, completion | of both together, and the end token  | what follows the prompt                     |
| source, target     | of each                              | the target                                  |
| input_ids          | as they are, without what is padding | the labels given, or the tokens themselves  |

What is longer than the limit is cut by the tokenizer, on the side that it is made for and around its special
tokens; how much was cut is counted, by looking at the whole first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, final

from snugfit.data.chat import conversation_of
from snugfit.data.rows import Row, Rows, as_text
from snugfit.data.tokens import Tokenizer, Tokens
from snugfit.errors import UsageError
from snugfit.job.batch import IGNORED
from snugfit.job.job import Job, Task

ROWS_AT_ONCE = 512
"""Enough for a fast tokenizer's threads, and little memory."""

Numbered = Sequence[tuple[int, Row]]


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A row as tokens."""

    ids: list[int]
    """Of the input."""

    labels: list[int] | None = None
    """One to each token, or to each of the target. Where they are classes' names, which of `named` it is."""

    named: list[Any] = field(default_factory=list)
    """As the row has them: the label of each word, or the one of a sequence."""

    types: list[int] | None = None
    """1 for tokens of the second text, where the model wants to know."""

    cut: int = 0
    """Tokens that were too many."""


@final
class Encoder:
    """Encodes the rows of one dataset for one job."""

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
        """None where the rows are tokens already."""
        self.limit = limit
        """Tokens of an input; None to cut nothing and to end each text, for what is packed."""

    def __iter__(self) -> Iterator[Encoded]:
        ways = {
            "input_ids": self._given,
            "tokens": self._words,
            "messages": self._chats,
            "prompt": self._prompts,
            "source": self._targets,
            "text": self._texts,
        }
        way = next(ways[role] for role in ways if role in self.columns)
        numbered = enumerate(self.rows)
        while chunk := list(islice(numbered, ROWS_AT_ONCE)):
            yield from way(chunk)

    # ---- the ways ---------------------------------------------------------------------------------------

    def _texts(self, chunk: Numbered) -> Iterator[Encoded]:
        texts = self._strings(chunk, "text")
        pairs = self._strings(chunk, "text_pair") if "text_pair" in self.columns else None
        for (index, row), found in zip(chunk, self._made(texts, pairs, limit=self.limit), strict=True):
            ids = found.ids if self.limit is not None else self._ended(found.ids)
            named = self._named(row, index)
            yield Encoded(ids=ids, named=named, types=found.types if pairs else None, cut=found.cut)

    def _words(self, chunk: Numbered) -> Iterator[Encoded]:
        lists = [self._list_of_words(row, index) for index, row in chunk]
        tokens = self._made(lists, limit=self.limit, words=True)
        for (index, row), words, found in zip(chunk, lists, tokens, strict=True):
            labels = self.rows.value(row, self.columns["label"], index)
            if not isinstance(labels, list) or len(labels) != len(words):
                count = len(labels) if isinstance(labels, list) else "no list of"
                raise UsageError(f"{self.rows.where(index)}: {len(words)} words and {count} labels.")
            firsts = [
                IGNORED if word is None or word == before else word
                for before, word in pairwise([None, *found.words])
            ]
            yield Encoded(ids=found.ids, labels=firsts, named=labels, cut=found.cut)

    def _chats(self, chunk: Numbered) -> Iterator[Encoded]:
        column = self.columns["messages"]
        places = [self.rows.where(index) for index, _ in chunk]
        values = [self.rows.value(row, column, index) for index, row in chunk]
        chats = [conversation_of(value, where) for value, where in zip(values, places, strict=True)]
        for ids, said in self._given_tokenizer().chats(chats, places):
            kept = ids[: self.limit]
            labels = [token if here else IGNORED for token, here in zip(ids, said or ids, strict=True)]
            asked = None if said is None else labels[: self.limit]
            yield Encoded(ids=kept, labels=asked, cut=len(ids) - len(kept))

    def _prompts(self, chunk: Numbered) -> Iterator[Encoded]:
        prompts = self._strings(chunk, "prompt")
        completions = self._strings(chunk, "completion")
        joined = [one + other for one, other in zip(prompts, completions, strict=True)]
        alone = self._made(prompts, limit=None)
        for prompt, whole in zip(alone, self._made(joined, limit=None), strict=True):
            ids = self._ended(whole.ids)
            shared = _shared(prompt.ids, ids)
            labels = [IGNORED] * shared + ids[shared:]
            kept = ids[: self.limit]
            yield Encoded(ids=kept, labels=labels[: self.limit], cut=len(ids) - len(kept))

    def _targets(self, chunk: Numbered) -> Iterator[Encoded]:
        sources = self._made(self._strings(chunk, "source"), limit=self.limit)
        targets = self._made(targets=self._strings(chunk, "target"), limit=self.job.target_length)
        for source, target in zip(sources, targets, strict=True):
            yield Encoded(ids=source.ids, labels=target.ids, cut=source.cut + target.cut)

    def _given(self, chunk: Numbered) -> Iterator[Encoded]:
        return (self._checked(row, index) for index, row in chunk)

    def _checked(self, row: Row, index: int) -> Encoded:
        ids = self._numbers(row, self.columns["input_ids"], index)
        if late := [name for name in _BESIDE if name in row and name not in self.rows.columns]:
            raise UsageError(f"{self.rows.where(index)}: it has {late[0]!r}, which the first row has not.")
        beside = {name: self._numbers(row, name, index) for name in _BESIDE if name in self.rows.columns}
        labels = None
        if "label" in self.columns and self.job.task is not Task.SEQUENCE_CLASSIFICATION:
            labels = self._numbers(row, self.columns["label"], index)
        if labels is not None and self.job.task is not Task.SEQ2SEQ_LM:
            beside["labels"] = labels
        for name, numbers in beside.items():
            if len(numbers) != len(ids):
                raise UsageError(
                    f"{self.rows.where(index)}: {len(ids)} input_ids and {len(numbers)} {name}; each token"
                    " has one."
                )
        seen = beside.pop("attention_mask", [1] * len(ids))
        kept = [place for place, here in enumerate(seen) if here]
        cut = len(kept) - len(kept[: self.limit])
        of = {name: [numbers[place] for place in kept[: self.limit]] for name, numbers in beside.items()}
        if self.job.task is Task.SEQ2SEQ_LM and labels is not None:
            of["labels"] = labels[: self.job.target_length]
            cut += len(labels) - len(of["labels"])
        ids = [ids[place] for place in kept[: self.limit]]
        return Encoded(
            ids=ids if self.limit is not None else self._ended(ids),
            labels=of.get("labels"),
            named=self._named(row, index),
            types=of.get("token_type_ids"),
            cut=cut,
        )

    def _made(self, *given: Any, **more: Any) -> list[Tokens]:
        return self._given_tokenizer().tokens(*given, **more)

    def _given_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UsageError(f"{self.rows.source}: its rows are text, and there is no tokenizer. Give one.")
        return self.tokenizer

    def _ended(self, ids: list[int]) -> list[int]:
        return ids if self.tokenizer is None else self.tokenizer.ended(ids)

    # ---- what stands in a row ---------------------------------------------------------------------------

    def _named(self, row: Row, index: int) -> list[Any]:
        if self.job.task is not Task.SEQUENCE_CLASSIFICATION:
            return []
        return [self.rows.value(row, self.columns["label"], index)]

    def _strings(self, chunk: Numbered, role: str) -> list[str]:
        return [self.rows.text(row, self.columns[role], index) for index, row in chunk]

    def _list_of_words(self, row: Row, index: int) -> list[str]:
        column = self.columns["tokens"]
        words = self.rows.value(row, column, index)
        if not isinstance(words, list):
            raise UsageError(f"{self.rows.where(index)}: {column!r} is {words!r:.40}; it is a list of words.")
        return [as_text(word, self.rows.where(index), column) for word in words]

    def _numbers(self, row: Row, column: str, index: int) -> list[int]:
        import numpy as np

        value = self.rows.value(row, column, index)
        try:
            numbers = np.asarray(value)
        except ValueError:  # lists of several lengths
            numbers = np.asarray(None)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            raise UsageError(
                f"{self.rows.where(index)}: {column!r} is {value!r:.40}; it is a list of numbers."
            )
        if numbers.size and not -_MOST <= numbers.min() <= numbers.max() < _MOST:
            raise UsageError(
                f"{self.rows.where(index)}: {column!r} holds {numbers.max()}, which is no token."
            )
        found: list[int] = numbers.tolist()
        return found


_BESIDE = ("attention_mask", "token_type_ids")
_MOST = 1 << 31


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike. The tokens of a prompt alone may end otherwise than
    those of the prompt with its completion: there the completion begins."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
