"""Paths of datasets: several files as one dataset, folders, and the errors about them."""

from __future__ import annotations

import csv
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from small_models import small_job
from small_runs import losses, rows, small_run
from snugfit.data import row_sources
from snugfit.data.columns import columns_of
from snugfit.data.row_sources import read_rows
from snugfit.data.rows import Rows
from snugfit.errors import UsageError
from snugfit.job.job import Task
from snugfit.training.run.train import train

TEXTS = ("one", "two", "three", "four", "five")


def write(file: Path, texts: tuple[str, ...]) -> None:
    """Write rows of a text and a number, in the format of the file's suffix."""
    held = [{"text": text, "number": len(text)} for text in texts]
    if file.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        schema = pyarrow.schema([("text", pyarrow.string()), ("number", pyarrow.int64())])
        parquet.write_table(pyarrow.Table.from_pylist(held, schema=schema), file)
    elif file.suffix == ".csv":
        with open(file, "w", newline="") as out:
            writer = csv.DictWriter(out, ["text", "number"])
            writer.writeheader()
            writer.writerows(held)
    elif file.suffix == ".txt":
        file.write_text("".join(f"{text}\n" for text in texts))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in held))


def shards(folder: Path, form: str) -> Path:
    """Write the texts to three files, in another order than that of their names. One file is empty."""
    folder.mkdir()
    write(folder / f"part-2{form}", TEXTS[3:])
    write(folder / f"part-0{form}", TEXTS[:3])
    write(folder / f"part-1{form}", ())
    return folder


def texts(source: Any) -> list[str]:
    return [row["text"] for row in read_rows(source)]


@pytest.mark.parametrize("form", [".jsonl", ".csv", ".txt", ".parquet"])
def test_several_files_are_one_dataset_in_the_order_of_their_names(form: str, tmp_path: Path) -> None:
    folder = shards(tmp_path / "data", form)
    pattern = f"{folder}/part-*{form}"
    assert texts(folder) == texts(pattern) == texts(Path(pattern)) == list(TEXTS)
    read = read_rows(folder)
    assert [read[index]["text"] for index in (4, 0, 3)] == ["five", "one", "four"]
    assert read.location(3).startswith(str(folder / f"part-2{form}"))
    assert texts(f"{folder}/part-2*") == list(TEXTS[3:])
    if form != ".txt":
        assert [row["number"] for row in read.select_columns({"number"})] == [row["number"] for row in read]


def test_patterns_reach_into_folders_and_leave_out_what_is_hidden(tmp_path: Path) -> None:
    for name in ("b", "a", ".old"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "rows.txt", (name,))
    write(tmp_path / "a" / "_draft.txt", ("draft",))
    assert texts(f"{tmp_path}/*/rows.txt") == ["a", "b"]
    assert texts(f"{tmp_path}/**/rows.txt") == ["a", "b"]
    assert texts(tmp_path / "a") == ["a"]
    literal = tmp_path / "rows[1].txt"
    write(literal, ("literal",))
    assert texts(literal) == ["literal"], "a file of that very name is no pattern"


def _kinds(folder: Path) -> None:
    write(folder / "a.jsonl", TEXTS)
    write(folder / "b.csv", TEXTS)


def _splits(folder: Path) -> None:
    write(folder / "train-00000-of-00001.jsonl", TEXTS)
    write(folder / "test-00000-of-00001.jsonl", TEXTS)


def _folders_of_splits(folder: Path) -> None:
    (folder / "train").mkdir()
    (folder / "test").mkdir()


def _columns(folder: Path) -> None:
    write(folder / "a.csv", TEXTS)
    (folder / "b.csv").write_text("text,numbr\none,1\n")


MISTAKES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "nothing fits": (lambda at: write(at / "a.jsonl", TEXTS), "*.json", "no file matches this pattern"),
    "only folders": (lambda at: (at / "inner").mkdir(), "in*", "matches only folders"),
    "an empty folder": (lambda at: None, "", "this folder has no files of samples"),
    "kinds": (_kinds, "", r"several kinds \(.csv, .jsonl\). Choose one kind with a pattern: .*\*.csv"),
    "another kind": (lambda at: (at / "a.xml").write_text(""), "*", "samples can be read from .txt"),
    "splits": (_splits, "", r"several splits \(test, train\). Choose one with a pattern: .*\*.jsonl"),
    "folders of splits": (
        _folders_of_splits,
        "",
        r"this folder contains splits. Give one of them: .*test, .*train",
    ),
    "columns": (_columns, "", r"b.csv: its columns are text, numbr, but those of .*a.csv are text, number"),
    "all empty": (lambda at: [write(at / n, ()) for n in ("a.txt", "b.txt")], "", "this dataset is empty"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_no_dataset_is_told(name: str, tmp_path: Path) -> None:
    made, pattern, says = MISTAKES[name]
    made(tmp_path)
    with pytest.raises(UsageError, match=says):
        read_rows(tmp_path / pattern)


def test_a_broken_line_is_told_with_its_own_file(tmp_path: Path) -> None:
    folder = shards(tmp_path / "data", ".jsonl")
    (folder / "part-2.jsonl").write_text('{"text": "four"}\n{"text"\n')
    with pytest.raises(UsageError, match=r"part-2.jsonl, line 2: not JSON"):
        texts(folder)


@pytest.mark.whole
def test_a_run_over_shards_is_one_over_the_whole(tmp_path: Path) -> None:
    """The samples and their order are the same, and a resumed run accepts them as the same data."""
    held = rows(24)
    (tmp_path / "data").mkdir()
    for number in range(3):
        lines = (json.dumps(row) + "\n" for row in held[8 * number : 8 * number + 8])
        (tmp_path / "data" / f"{number}.jsonl").write_text("".join(lines))
    whole = small_run(tmp_path / "whole", samples=held, max_steps=4)
    parts = small_run(tmp_path / "parts", samples=f"{tmp_path}/data/*.jsonl", max_steps=4)
    assert whole.data.fingerprint() == parts.data.fingerprint()
    for run in (whole, parts):
        train(run)
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    (tmp_path / "data" / "2.jsonl").rename(tmp_path / "data" / "-2.jsonl")
    moved = small_run(tmp_path / "parts", samples=f"{tmp_path}/data/*.jsonl", max_steps=4)
    with pytest.raises(UsageError, match="data has the same number of samples, but other samples"):
        train(moved)


COLUMNS: list[tuple[Task, str, str]] = [
    (Task.CAUSAL_LM, "prompt prompt_id messages", "messages=messages"),
    (Task.CAUSAL_LM, "id conversations", "messages=conversations"),
]


def test_a_task_without_a_reader_is_named(tmp_path: Path) -> None:
    """The reader's feature is missing, or the model is a module from Python."""
    job = replace(small_job("vit"), task="image-classification")
    with pytest.raises(UsageError, match="the task image-classification cannot be trained from rows"):
        columns_of(read_rows([{"image": "1.png", "label": 1}]), job)


@pytest.mark.parametrize(("task", "columns", "roles"), COLUMNS)
def test_columns_of_chats_are_found(task: Task, columns: str, roles: str) -> None:
    found = columns_of(
        read_rows([dict.fromkeys(columns.split(), "x")]), replace(small_job("gpt2"), task=task)
    )
    assert " ".join(f"{role}={column}" for role, column in found.items()) == roles


# ---- media in Arrow -------------------------------------------------------------------------------------


def test_parquet_holds_the_columns_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "rows.parquet", TEXTS)
    held: Rows = read_rows(tmp_path / "rows.parquet").select_columns({"text"})
    assert (held.columns, held[4], held.folder_of(0)) == (("text",), {"text": "five"}, tmp_path)
    assert list(pickle.loads(pickle.dumps(held))) == list(held)
    monkeypatch.setattr(row_sources, "LARGEST_IN_MEMORY", 10)
    with pytest.raises(UsageError, match=r"in the columns text; .* at most 10 B.*save_to_disk\(FOLDER\)"):
        read_rows(tmp_path / "rows.parquet").select_columns({"text"})
