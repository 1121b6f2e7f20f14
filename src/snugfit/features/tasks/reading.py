"""Reading of a dataset's rows as samples of this feature's tasks, through the tokenizer of the model.

| task               | columns                                                                            |
|--------------------|------------------------------------------------------------------------------------|
| question-answering | question, context, and answers: {"text": [...], "answer_start": [...]} as in SQuAD |
|                    | question, context, answer, answer_start                                            |
| multiple-choice    | question (or context), choices, label                                              |
|                    | sent1, sent2, ending0, ending1, ending2, ending3, label as in SWAG                 |
| text-embedding     | text and text_pair, such as a question and its passage                             |

A context that is too long becomes several samples that overlap, as in SQuAD's baselines. A sample without the
answer has its positions at the classification token. Choices are a list of texts, or {"text": [...],
"label": ["A", "B", ...]}.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from snugfit.data.columns import Form, columns_of
from snugfit.data.encoding import ROWS_AT_ONCE
from snugfit.data.ragged import RaggedBuilder
from snugfit.data.rows import Rows, as_text
from snugfit.data.samples import refuse_unknown_tokens
from snugfit.data.tokens import Tokenizer, as_tokenizer, padding_token
from snugfit.errors import UsageError, one_line
from snugfit.features.tasks.contrast import TEXTS
from snugfit.features.tasks.samples import SequenceSamples
from snugfit.features.tasks.tasks import CHOICES, EMBEDDING, QUESTIONS
from snugfit.job.job import Job, Task

ENDINGS = ("ending0", "ending1", "ending2", "ending3")

INPUTS: Mapping[Task, tuple[Form, ...]] = {
    Task(QUESTIONS.name): (
        ("question", "context", "answer", "answer_start"),
        ("question", "context", "answers"),
    ),
    Task(CHOICES.name): (("sent1", "sent2", *ENDINGS), ("question", "choices")),
    Task(EMBEDDING.name): (("text", "text_pair"),),
}
"""Roles of the columns that each task reads, as `data/columns.py` has them for tasks of the core."""

USUAL: Mapping[Form, tuple[Form, ...]] = {
    ("text", "text_pair"): (
        ("text", "text_pair"), ("anchor", "positive"), ("query", "positive"), ("query", "document"),
        ("query", "passage"), ("question", "answer"), ("sentence1", "sentence2"), ("premise", "hypothesis"),
        ("title", "abstract"),
    ),
    ("question", "context", "answers"): (("question", "context", "answers"),),
    ("question", "context", "answer", "answer_start"): (
        ("question", "context", "answer", "answer_start"),
        ("question", "context", "answer_text", "answer_start"),
    ),
    ("sent1", "sent2", *ENDINGS): (("sent1", "sent2", *ENDINGS),),
    ("question", "choices"): (
        ("question", "choices"), ("context", "choices"), ("question", "options"), ("context", "endings"),
        ("ctx", "endings"), ("premise", "choices"),
    ),
}  # fmt: skip
"""Usual column names, by roles."""

LABELS: Mapping[Task, Form] = {
    Task(CHOICES.name): ("label", "labels", "answerKey", "answer", "correct", "gold"),
}
"""Usual names of the label's column, by task."""

STRIDE = 128
"""Number of tokens that neighbouring samples of one long context share, as in BERT's `run_squad.py`."""


def read_samples(
    rows: Rows, job: Job, tokenizer: Any | None, *, pack: bool, label_names: Sequence[str]
) -> SequenceSamples:
    """Return a dataset's rows as samples of this job. Raises `UsageError` that names an invalid row."""
    if pack:
        raise UsageError(f"Packing joins texts, which {job.task} must not. Leave packing out.")
    columns = columns_of(rows, job, INPUTS, USUAL, LABELS)
    tokenizer = as_tokenizer(tokenizer)
    if tokenizer is None:
        raise UsageError(
            f"{rows.source}: its rows are text, but no tokenizer was found. Give one: tokenizer=FOLDER, or "
            "--tokenizer FOLDER."
        )
    samples = READERS[job.task](rows, columns, job, tokenizer)
    refuse_unknown_tokens(samples.inputs, job.model.vocabulary, job, lambda _: rows.source)
    return samples


# ---- question answering ------------------------------------------------------------------------------------


def read_questions(rows: Rows, columns: Mapping[str, str], job: Job, tokenizer: Any) -> SequenceSamples:
    """Return questions with their contexts as pairs of texts, and the tokens of their answers.

    Raises `UsageError` for a tokenizer without character offsets, and for an answer that is not in its
    context.
    """
    import numpy as np

    if not getattr(tokenizer, "is_fast", False):
        raise UsageError(
            f"{job.task} needs a fast tokenizer, which has the characters of each token. Give one "
            "(tokenizer.is_fast)."
        )
    inputs, types = RaggedBuilder(), RaggedBuilder()
    spans: dict[str, array[int]] = {"start_positions": array("q"), "end_positions": array("q")}
    numbered, typed = enumerate(rows), False
    while chunk := list(islice(numbered, ROWS_AT_ONCE)):
        texts = [[rows.text(row, columns[role], index) for index, row in chunk] for role in _PAIR]
        answers = [_answer(rows, row, columns, index) for index, row in chunk]
        encoding = _encode_pairs(rows, chunk[0][0], tokenizer, texts, job.sequence_length)
        typed = typed or "token_type_ids" in encoding
        for number, row in enumerate(encoding["overflow_to_sample_mapping"]):
            ids = encoding["input_ids"][number]
            inputs.append(ids)
            types.append(encoding["token_type_ids"][number] if typed else [])
            first, last = _span_of(encoding, number, answers[row], _class_position(ids, tokenizer))
            spans["start_positions"].append(first)
            spans["end_positions"].append(last)
    return SequenceSamples(
        inputs=inputs.build(),
        types=types.build() if typed else None,
        positions={name: np.array(values, dtype=np.int64) for name, values in spans.items()},
        pad_token=padding_token(job, tokenizer),
        notes=tuple(rows.notes()),
    )


_PAIR = ("question", "context")

Answer = tuple[int, int]
"""First character of an answer in its context, and the character after the last; (-1, -1) without answer."""


def _answer(rows: Rows, row: Mapping[str, Any], columns: Mapping[str, str], index: int) -> Answer:
    """Return the characters of a row's first answer. Raises `UsageError` if they are not in the context."""
    if "answers" in columns:
        given = rows.value(row, columns["answers"], index)
        # A list of answers has one mapping for each of them.
        given = given[0] if isinstance(given, list) and given else given or {}
        texts, starts = (_as_list(given.get(key, ())) for key in ("text", "answer_start"))
    else:
        texts, starts = (_as_list(rows.value(row, columns[key], index)) for key in ("answer", "answer_start"))
    if not texts or not starts:
        return -1, -1
    context = rows.text(row, columns["context"], index)
    text, start = as_text(texts[0], rows.location(index), "answer"), starts[0]
    if not isinstance(start, int) or start < 0 or context[start : start + len(text)] != text:
        raise UsageError(
            f"{rows.location(index)}: the answer {text!r:.40} does not begin at character {start!r:.20} of "
            "the context. Correct answer_start, which counts from 0."
        )
    return int(start), int(start) + len(text)


def _as_list(value: Any) -> list[Any]:
    """Return a list or array as a list, a single value as a list of it, and None as an empty list."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _encode_pairs(rows: Rows, first: int, tokenizer: Any, texts: list[list[str]], limit: int) -> Any:
    """Return the tokens of questions with contexts. A long context has several overlapping windows."""
    questions, contexts = texts
    try:
        return tokenizer(
            [question.lstrip() for question in questions],
            contexts,
            truncation="only_second",
            max_length=limit,
            stride=min(STRIDE, limit // 3),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            padding=False,
            verbose=False,
        )
    except Exception as error:  # a question longer than the limit, or a custom tokenizer's error
        longest = max(range(len(questions)), key=lambda index: len(questions[index]))
        raise UsageError(
            f"{rows.location(first + longest)}: the tokenizer fails on a question with its context "
            f"({one_line(error, 200)}). Set a longer sequence length than {limit}, or shorten the question."
        ) from error


def _class_position(ids: list[int], tokenizer: Any) -> int:
    """Return the position of the classification token; 0 without one."""
    token = getattr(tokenizer, "cls_token_id", None)
    return ids.index(token) if token in ids else 0


def _span_of(encoding: Any, number: int, answer: Answer, elsewhere: int) -> tuple[int, int]:
    """Return the first and last token of an answer in a window of its context. Both are `elsewhere` if the
    window does not contain the whole answer.
    """
    offsets, parts = encoding["offset_mapping"][number], encoding.sequence_ids(number)
    context = [position for position, part in enumerate(parts) if part == 1]
    start, stop = answer
    if start < 0 or not context or offsets[context[0]][0] > start or offsets[context[-1]][1] < stop:
        return elsewhere, elsewhere
    first = max(position for position in context if offsets[position][0] <= start)
    last = next(position for position in context if offsets[position][1] >= stop)
    return first, max(first, last)


# ---- multiple choice ---------------------------------------------------------------------------------------


def read_choices(rows: Rows, columns: Mapping[str, str], job: Job, tokenizer: Any) -> SequenceSamples:
    """Return questions, each paired with all of its choices, and the numbers of the correct choices.

    Raises `UsageError` for a row with another number of choices than the job's `labels`.
    """
    import numpy as np

    inputs, types, label = RaggedBuilder(), RaggedBuilder(), array("q")
    words, cut, lost, typed = Tokenizer(tokenizer), 0, 0, False
    for index, row in enumerate(rows):
        question, choices, names = _choices(rows, row, columns, index)
        if len(choices) != job.labels:
            raise UsageError(
                f"{rows.location(index)}: {len(choices)} choices, but the job has {job.labels} labels. Set "
                f"labels: {len(choices)}, or remove the row."
            )
        label.append(
            _choice_number(rows, row, columns["label"], index, names or [*map(str, range(job.labels))])
        )
        questions = [question] * len(choices)
        for tokens in words.tokens(questions, choices, limit=job.sequence_length):
            inputs.append(tokens.ids)
            types.append(tokens.types or [])
            typed = typed or tokens.types is not None
            cut, lost = cut + (tokens.cut > 0), lost + tokens.cut
    return SequenceSamples(
        inputs=inputs.build(),
        types=types.build() if typed else None,
        sequences=job.labels,
        label=np.array(label, dtype=np.int64),
        label_names=tuple(map(str, range(job.labels))),
        pad_token=padding_token(job, tokenizer),
        cut=cut,
        cut_tokens=lost,
        notes=tuple(rows.notes()),
    )


def _choices(
    rows: Rows, row: Mapping[str, Any], columns: Mapping[str, str], index: int
) -> tuple[str, list[str], list[str]]:
    """Return a row's question, the texts of its choices, and their names such as letters (or none)."""
    if "sent1" in columns:
        begin = rows.text(row, columns["sent2"], index)
        endings = [f"{begin} {rows.text(row, columns[name], index)}" for name in ENDINGS]
        return rows.text(row, columns["sent1"], index), endings, []
    column = columns["choices"]
    given, names = rows.value(row, column, index), []
    if isinstance(given, Mapping):
        names = [str(name) for name in _as_list(given.get("label"))]
        given = given.get("text")
    texts = [as_text(text, rows.location(index), column) for text in _as_list(given)]
    return rows.text(row, columns["question"], index), texts, names


def _choice_number(rows: Rows, row: Mapping[str, Any], column: str, index: int, names: Sequence[str]) -> int:
    """Return the number of the correct choice in `names`. Raises `UsageError` if it is none of them."""
    value = rows.value(row, column, index)
    if (name := str(value)) in names:
        return names.index(name)
    raise UsageError(
        f"{rows.location(index)}: {column!r} is {value!r:.40}, which is not a choice. Allowed are "
        f"{', '.join(names)}. Correct this row, or remove it."
    )


# ---- embeddings --------------------------------------------------------------------------------------------


def read_pairs(rows: Rows, columns: Mapping[str, str], job: Job, tokenizer: Any) -> SequenceSamples:
    """Return pairs of texts, each text as a sequence of its own."""
    inputs, words, cut, lost = RaggedBuilder(), Tokenizer(tokenizer), 0, 0
    numbered = enumerate(rows)
    while chunk := list(islice(numbered, ROWS_AT_ONCE)):
        pairs = [
            rows.text(row, columns[role], index) for index, row in chunk for role in ("text", "text_pair")
        ]
        for tokens in words.tokens(pairs, limit=job.sequence_length):
            inputs.append(tokens.ids)
            cut, lost = cut + (tokens.cut > 0), lost + tokens.cut
    return SequenceSamples(
        inputs=inputs.build(),
        sequences=TEXTS,
        pad_token=padding_token(job, tokenizer),
        cut=cut,
        cut_tokens=lost,
        notes=tuple(rows.notes()),
    )


READERS: Mapping[str, Callable[[Rows, Mapping[str, str], Job, Any], SequenceSamples]] = {
    QUESTIONS.name: read_questions,
    CHOICES.name: read_choices,
    EMBEDDING.name: read_pairs,
}
"""Functions that read a task's rows with a tokenizer."""
