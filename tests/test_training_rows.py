"""Rows of a dataset: all formats give the same rows, and each error names the file and the line."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from small_models import small_job
from snugfit.data import text_rows
from snugfit.data.columns import columns_of
from snugfit.data.row_sources import read_rows
from snugfit.data.rows import Rows
from snugfit.errors import UsageError
from snugfit.job.job import Job, Task
from snugfit.job.model import Model

ROWS = [
    {"text": "one, two\nthree", "label": "a"},
    {"text": 'a "word"', "label": "b"},
    {"text": "überall", "label": "a"},
]
CELLS = '"one, two\nthree",a\n"a ""word""",b\n\nüberall,a\n'
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)

WRITTEN: dict[str, str] = {
    "lines.jsonl": LINES,
    "windows.jsonl": "\ufeff" + LINES.replace("\n", "\r\n\r\n"),
    "lines.json": LINES,
    "unescaped.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS),
    "list.json": json.dumps(ROWS, indent=1),
    "table.csv": "text,label\n" + CELLS,
    "windows.csv": "\ufefftext, label\r\n" + CELLS.replace('a\n"a', 'a\r\n"a'),
    "table.tsv": "text\tlabel\n" + CELLS.replace(",a\n", "\ta\n").replace(",b\n", "\tb\n"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_each_form_of_text_says_the_same(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(WRITTEN[name].encode())
    rows = read_rows(tmp_path / name)
    assert list(rows) == ROWS == [rows[0], rows[1], rows[2]] == rows[:]
    assert (rows[-1], rows.columns) == (ROWS[-1], ("text", "label"))
    with pytest.raises(IndexError):
        rows[3]


def test_a_line_of_text_is_a_sample(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_bytes("\ufefffirst\r\n\r\n  \n  second \nlast".encode())
    rows = read_rows(tmp_path / "lines.txt")
    assert [row["text"] for row in rows] == ["first", "  second ", "last"]
    assert rows.location(1).endswith("lines.txt, line 4")


def _parquet(path: Path) -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path / "rows.parquet", row_group_size=2)
    return path / "rows.parquet"


def _saved(path: Path) -> Path:
    import datasets

    datasets.Dataset.from_list(ROWS).with_format("numpy").save_to_disk(str(path / "saved"))
    return path / "saved"


def _splits(path: Path) -> Path:
    import datasets

    made = datasets.DatasetDict(
        {"test": datasets.Dataset.from_list(ROWS[:1]), "train": datasets.Dataset.from_list(ROWS)}
    )
    made.save_to_disk(str(path / "splits"))
    return path / "splits"


@pytest.mark.parametrize("write", [_parquet, _saved, _splits])
def test_arrow_says_the_same(write: Callable[[Path], Path], tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path))
    assert list(rows) == ROWS == [rows[0], rows[1], rows[2]]
    assert rows.columns == ("text", "label")


def test_a_split_is_chosen_by_its_folder(tmp_path: Path) -> None:
    path = _splits(tmp_path)
    assert list(read_rows(path / "test")) == ROWS[:1]
    import datasets

    parts = {name: datasets.Dataset.from_list(ROWS[:1]) for name in ("dev", "test")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "parts"))
    with pytest.raises(
        UsageError,
        match=r"this folder has no split 'train', but dev, test. Give the folder of one "
        r"split: .*parts/dev",
    ):
        read_rows(tmp_path / "parts")
    assert list(read_rows(tmp_path / "parts" / "dev")) == ROWS[:1]


def test_a_saved_dataset_knows_its_classes() -> None:
    import datasets

    named = datasets.ClassLabel(names=["no", "yes"])
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": named, "ner_tags": datasets.Sequence(named)}
    )
    rows = read_rows(
        datasets.Dataset.from_list([{"text": "x", "label": 1, "ner_tags": [0, 1]}], features=features)
    )
    assert rows.class_names("label") == rows.class_names("ner_tags") == ("no", "yes")
    assert rows.class_names("text") == ()


MISTAKES: dict[str, tuple[str | bytes, str]] = {
    "empty.txt": ("\n \n", "this dataset is empty"),
    "empty.jsonl": ("", "this dataset is empty"),
    "empty.json": ("[]", "this dataset is empty"),
    "head.csv": ("text,label\n", "this dataset is empty"),
    "none.csv": ("", "this dataset is empty"),
    "broken.jsonl": ('{"text": "a"}\n\n{"text": \n', "broken.jsonl, line 3: not JSON: Expecting value."),
    "number.jsonl": ('{"text": "a"}\n7\n', "line 2: a sample must be an object"),
    "number.json": ("7", "a list of objects, or one object per line"),
    "pretty.json": ('{\n "text": "a"\n}', "line 1: not JSON"),
    "list.json": ('[{"text": "a"}, 7]', "row 2: a sample must be an object"),
    "twice.jsonl": ('{"text": "a", "text": "b"}', "the key 'text' is given twice"),
    "deep.jsonl": ("[" * 200_000, "nested too deep"),
    "ragged.csv": ("text,label\na,1\n\nb,c,1\n", "line 4: 3 cells under 2 columns"),
    "short.csv": ("text,label\na,1\nb\n", "line 3: 1 cells under 2 columns"),
    "quote.csv": ('text,label\n"a,1\nb,2\n', "was opened and never closed"),
    "nameless.csv": ("text,\na,1\n", "column 2 of the first line has no name"),
    "twins.csv": ("text,text\na,1\n", "two columns are called 'text'"),
    "latin.txt": ("good\ncafé\n".encode("latin-1"), "latin.txt, line 2: byte 4 (0xe9) is not UTF-8"),
    "latin.csv": ("text\ngood\ncafé\n".encode("latin-1"), "in line 3. Save the file as UTF-8"),
    "latin.json": ('[{"text": "café"}]'.encode("latin-1"), "is not UTF-8"),
    "utf16.txt": ("good\n".encode("utf-16"), "this is UTF-16"),
    "rows.arrow": ("", "samples can be read from .txt, .jsonl, .json, .csv, .tsv, .parquet"),
    "rows.parquet": ("PAR1", "this is not a Parquet file"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_with_its_file(name: str, tmp_path: Path) -> None:
    content, says = MISTAKES[name]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError) as told:
        list(read_rows(path))
    assert str(path) in str(told.value)
    assert says in str(told.value)
    assert len(str(told.value)) < 300 + len(str(path))


def test_what_is_no_file_of_samples(tmp_path: Path) -> None:
    (tmp_path / "reviews.csv").write_text("text\na\n")
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere.txt")
    for name, says in (
        ("review.csv", "there is no such file. Did you mean 'reviews.csv'"),
        ("no/such.csv", "there is no such file"),
        ("dangling.txt", "no such file"),
        ("no/such/*.csv", "no file matches this pattern"),
    ):
        with pytest.raises(UsageError, match=says):
            read_rows(tmp_path / name)


def test_a_damaged_saved_dataset_is_told(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    next(path.glob("*.arrow")).write_bytes(b"nothing")
    with pytest.raises(UsageError, match="datasets library cannot load this"):
        read_rows(path)


def test_a_file_that_is_held_whole_has_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_rows, "LARGEST_IN_MEMORY", 10)
    (tmp_path / "large.csv").write_text("text\n" + "word\n" * 10)
    with pytest.raises(UsageError, match=r"55 bytes; a \.csv file is read into memory.*\.jsonl or \.parquet"):
        read_rows(tmp_path / "large.csv")


def test_a_long_cell_is_read_and_the_limit_of_csv_is_put_back(tmp_path: Path) -> None:
    import csv

    before = csv.field_size_limit()
    (tmp_path / "long.csv").write_text("text\n" + "word " * 100_000 + "\n")
    assert len(read_rows(tmp_path / "long.csv")[0]["text"]) == 500_000
    assert csv.field_size_limit() == before


GIVEN: dict[str, tuple[Any, str]] = {
    "a mapping of splits": ({"train": ROWS}, r"Choose one of its splits: \['train'\]"),
    "numbers": ([1, 2], "rows of a dataset must be mappings"),
    "text": (("one", "two"), "rows of a dataset must be mappings"),
    "nothing": ([], "this dataset is empty"),
    "a number": (7, "not of type int"),
    "an iterator": (iter(ROWS), "not of type list_iterator"),
}


def test_what_is_streamed_or_lies_in_columns() -> None:
    import datasets
    import pandas

    with pytest.raises(UsageError, match="a streamed dataset has no length"):
        read_rows(datasets.Dataset.from_list(ROWS).to_iterable_dataset())
    with pytest.raises(UsageError, match="rows of a dataset must be mappings"):
        read_rows(pandas.DataFrame(ROWS))


@pytest.mark.parametrize("name", GIVEN)
def test_what_is_no_dataset_in_python(name: str) -> None:
    given, says = GIVEN[name]
    with pytest.raises(UsageError, match=says):
        read_rows(given)


# ---- columns --------------------------------------------------------------------------------------------

CLASSES, WORDS = Task.SEQUENCE_CLASSIFICATION, Task.TOKEN_CLASSIFICATION
FAMILY = {Task.CAUSAL_LM: "gpt2", Task.SEQ2SEQ_LM: "t5"}


def found(task: Task, columns: str, asked: dict[str, str] | None = None) -> str:
    rows = read_rows([dict.fromkeys(columns.split(), "x")], columns=asked)
    roles = columns_of(rows, replace(small_job(FAMILY.get(task, "bert")), task=task))
    return " ".join(f"{role}={column}" for role, column in roles.items())


FOUND: list[tuple[Task, str, dict[str, str], str]] = [
    (CLASSES, "text label", {}, "text=text label=label"),
    (CLASSES, "idx sentence label", {}, "text=sentence label=label"),
    (CLASSES, "sentence1 sentence2 label", {}, "text=sentence1 text_pair=sentence2 label=label"),
    (CLASSES, "premise hypothesis label", {}, "text=premise text_pair=hypothesis label=label"),
    (CLASSES, "question sentence label", {}, "text=question text_pair=sentence label=label"),
    (CLASSES, "words_of_it label id", {}, "text=words_of_it label=label"),
    (CLASSES, "text label label_text", {}, "text=text label=label"),
    (CLASSES, "review stars", {"label": "stars"}, "text=review label=stars"),
    (CLASSES, "a b stars", {"text": "b", "label": "stars"}, "text=b label=stars"),
    (CLASSES, "a b label", {"text": "b", "text_pair": "a"}, "text=b text_pair=a label=label"),
    (CLASSES, "text sentence2 label", {"text": "text"}, "text=text label=label"),
    (CLASSES, "input_ids attention_mask label", {}, "input_ids=input_ids label=label"),
    (CLASSES, "input_ids text label", {"text": "text"}, "text=text label=label"),
    (WORDS, "id tokens pos_tags ner_tags", {}, "tokens=tokens label=ner_tags"),
    (WORDS, "tokens pos_tags ner_tags", {"labels": "pos_tags"}, "tokens=tokens label=pos_tags"),
    (Task.CAUSAL_LM, "text", {}, "text=text"),
    (Task.CAUSAL_LM, "story", {}, "text=story"),
    (Task.CAUSAL_LM, "prompt completion", {}, "prompt=prompt completion=completion"),
    (Task.CAUSAL_LM, "question answer", {}, "prompt=question completion=answer"),
    (Task.CAUSAL_LM, "q response", {"prompt": "q"}, "prompt=q completion=response"),
    (Task.CAUSAL_LM, "input_ids labels", {}, "input_ids=input_ids label=labels"),
    (Task.CAUSAL_LM, "input_ids", {}, "input_ids=input_ids"),
    (Task.MASKED_LM, "text label", {}, "text=text"),
    (Task.SEQ2SEQ_LM, "article highlights id", {}, "source=article target=highlights"),
    (Task.SEQ2SEQ_LM, "input_ids labels", {}, "input_ids=input_ids label=labels"),
    (
        Task.SEQ2SEQ_LM, "translation", {"source": "translation.en", "target": "translation.de"},
        "source=translation.en target=translation.de",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("task", "columns", "asked", "roles"), FOUND)
def test_columns_are_found(task: Task, columns: str, asked: dict[str, str], roles: str) -> None:
    assert found(task, columns, asked) == roles


AMISS: list[tuple[Task, str, dict[str, str], str]] = [
    (
        CLASSES,
        "a b label",
        {},
        r"which column is the text\? Its columns: 'a', 'b', 'label'.*\"text\": \"NAME\"",
    ),
    (CLASSES, "text reviw", {"text": "review"}, r"no column 'review'. Its columns: 'reviw', 'text'"),
    (CLASSES, "text", {}, r"which column is the label\?.*--columns label=NAME"),
    (CLASSES, "text label", {"txet": "text"}, r"'txet' is not a role of a column. Did you mean 'text'"),
    (
        CLASSES,
        "text label",
        {"source": "text"},
        "sequence-classification reads input_ids or text with text_pair",
    ),
    (Task.CAUSAL_LM, "text label", {"label": "label"}, "uses no labels"),
    (Task.CAUSAL_LM, "instruction output input", {}, r"which column is the text\?"),
    (
        Task.SEQ2SEQ_LM,
        "a b",
        {"source": "a"},
        r'which column is the target\?.*={"target": "NAME"}.*--columns "target=NAME"',
    ),
    (Task.SEQ2SEQ_LM, "input_ids", {}, "which column is the label"),
]


@pytest.mark.parametrize(("task", "columns", "asked", "says"), AMISS)
def test_columns_that_are_not_there(task: Task, columns: str, asked: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        found(task, columns, asked)


def test_columns_are_a_mapping_of_names() -> None:
    for asked, says in (
        ("review", "it must be a mapping"),
        ({"text": 7}, "no column 7. Its columns: 'text'"),
    ):
        with pytest.raises(UsageError, match=says):
            read_rows(ROWS, columns=asked)


def test_modules_from_python_have_no_rows() -> None:
    module = torch.nn.Linear(1, 1)
    model = Model.from_module(module, {"input": torch.ones(1, 1)})
    with pytest.raises(UsageError, match="the task custom cannot be trained from rows"):
        columns_of(read_rows(ROWS), Job(model=model, task=Task.CUSTOM))


def test_a_key_within_a_column() -> None:
    rows = read_rows([{"translation": {"en": "house", "de": "Haus"}, "a.b": 1}])
    assert rows.value(rows[0], "translation.de", 0) == "Haus"
    assert rows.value(rows[0], "a.b", 0) == 1
    with pytest.raises(UsageError, match=r"row 1: it has no 'translation.fr'"):
        rows.value(rows[0], "translation.fr", 0)


def test_rows_are_read_when_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error about a broken line appears at that line, with its own number."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text"\n{"text": "c"}\n')
    rows = read_rows(tmp_path / "rows.jsonl")
    assert (len(rows), rows[2]) == (3, {"text": "c"})
    opened: list[str] = []
    real = builtins.open
    monkeypatch.setattr(builtins, "open", lambda *of, **more: opened.append("") or real(*of, **more))
    with pytest.raises(UsageError, match="line 2: not JSON"):
        list(rows)
    assert len(opened) == 1, "one pass opens the file once"


def test_rows_is_what_a_sequence_is() -> None:
    assert isinstance(read_rows(ROWS), Rows)
    assert ROWS[1] in read_rows(ROWS)
