"""Assignment of a dataset's columns to the inputs of a task (text, label, ...), by common or given names.

A task takes its input in one of several forms. A classifier takes a text, two texts, or token ids. A form
matches if all of its columns exist under names that belong together. `question` with `sentence` is a pair
(QNLI); `question` with `answer` is a prompt and its completion. Forms are tried in the order of `INPUTS`,
common names in the order of `USUAL`. If no form matches, a single remaining column that could be text is the
text. Nothing else is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping

from snugfit.data.rows import Rows
from snugfit.errors import UsageError
from snugfit.job.job import Job, Task

Form = tuple[str, ...]

INPUTS: dict[Task, tuple[Form, ...]] = {
    Task.SEQUENCE_CLASSIFICATION: (("input_ids",), ("text", "text_pair"), ("text",)),
    Task.TOKEN_CLASSIFICATION: (("input_ids",), ("tokens",)),
    Task.CAUSAL_LM: (("input_ids",), ("messages",), ("prompt", "completion"), ("text",)),
    Task.MASKED_LM: (("input_ids",), ("text",)),
    Task.SEQ2SEQ_LM: (("input_ids",), ("source", "target")),
}
"""Sets of columns that give the input of each task, in the order of preference. Other tasks need prepared
samples."""

USUAL: dict[Form, tuple[Form, ...]] = {
    ("input_ids",): (("input_ids",),),
    ("tokens",): (("tokens",), ("words",)),
    ("text",): (
        ("text",), ("sentence",), ("content",), ("review",), ("document",), ("body",), ("utterance",),
        ("tweet",), ("sms",),
    ),
    ("text", "text_pair"): (
        ("text", "text_pair"), ("sentence1", "sentence2"), ("premise", "hypothesis"),
        ("question1", "question2"), ("question", "sentence"), ("text1", "text2"),
    ),
    ("messages",): (("messages",), ("conversations",), ("conversation",)),
    ("prompt", "completion"): (("prompt", "completion"), ("prompt", "response"), ("question", "answer")),
    ("source", "target"): (
        ("source", "target"), ("document", "summary"), ("article", "highlights"), ("dialogue", "summary"),
        ("text", "summary"), ("input_text", "target_text"), ("input", "output"), ("src", "tgt"),
        ("question", "answer"),
    ),
}  # fmt: skip

LABELS: dict[Task, Form] = {
    Task.SEQUENCE_CLASSIFICATION: ("label", "labels", "class", "category", "target", "intent", "score"),
    Task.TOKEN_CLASSIFICATION: ("ner_tags", "labels", "tags", "pos_tags", "chunk_tags", "upos", "label"),
}  # fmt: skip
"""Names of the label's column per task, for inputs that are not token ids."""

NO_TEXT = ("id", "idx", "index", "guid", "label", "labels", "label_text", "__index_level_0__")
"""Names of columns that are never taken for the text of a sample."""


def columns_of(
    rows: Rows,
    job: Job,
    inputs: Mapping[Task, tuple[Form, ...]] = INPUTS,
    usual: Mapping[Form, tuple[Form, ...]] = USUAL,
    labels: Mapping[Task, Form] = LABELS,
) -> dict[str, str]:
    """Return the dataset's column for each role of the task, such as text or label, by these tables of names.

    Raises `UsageError` with the existing columns if one is missing.
    """
    if job.task not in inputs:
        raise UsageError(
            f"{rows.source}: the task {job.task} cannot be trained from rows. Give snugfit.train a dataset "
            "whose samples are the model's arguments."
        )
    columns = _input_columns(rows, job.task, inputs[job.task], usual)
    names = labels.get(job.task, ())
    if "input_ids" in columns:
        names = names[:2] if job.task is Task.SEQUENCE_CLASSIFICATION else ("labels",)
    if label := _label_column(rows, job.task, names):
        columns["label"] = label
    return columns


def _input_columns(
    rows: Rows, task: Task, inputs: tuple[Form, ...], usual: Mapping[Form, tuple[Form, ...]]
) -> dict[str, str]:
    named = {role: column for role, column in rows.named.items() if role not in ("label", "labels")}
    forms = [form for form in inputs if set(named) <= set(form)]
    if not forms:
        allowed = " or ".join(" with ".join(form) for form in inputs)
        raise UsageError(f"columns: {task} reads {allowed}, not {' with '.join(named)}.")
    if named:  # prefer the set of columns that the user named
        forms.sort(key=len)
    for form in forms:
        for names in usual[form]:
            candidate = {role: named.get(role, name) for role, name in zip(form, names, strict=True)}
            if all(rows.has(column) for column in candidate.values()):
                return candidate
    if ("text",) in forms and (only := _only_text(rows)):
        return {"text": only}
    missing = [role for role in forms[-1] if role not in named]
    shape = ", ".join(f'"{role}": "NAME"' for role in missing)
    flag = ", ".join(f"{role}=NAME" for role in missing)
    raise UsageError(
        f"{rows.source}: which column is the {' and which the '.join(missing)}?"
        f" {rows.column_list(missing[0])} Name it: columns={{{shape}}}, or"
        f' --columns "{flag}".'
    )


def _only_text(rows: Rows) -> str | None:
    left = [column for column in rows.columns if column not in (*NO_TEXT, *rows.named.values())]
    return left[0] if len(left) == 1 else None


def _label_column(rows: Rows, task: Task, usual: Form) -> str | None:
    named_column = rows.named.get("label", rows.named.get("labels"))
    if named_column and not usual:
        raise UsageError(
            f"columns: {task} uses no labels: it learns from the text itself. Leave {named_column!r} out."
        )
    label = named_column or next((column for column in usual if column in rows.columns), None)
    if label is None and task not in (Task.CAUSAL_LM, Task.MASKED_LM) and usual:
        raise UsageError(
            f"{rows.source}: which column is the label? {rows.column_list('label')} Name it:"
            ' columns={"label": "NAME"}, or --columns label=NAME.'
        )
    return label
