"""Folders of pictures, and the columns of tables that name them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from small_media import pets, picture

from small_models import small_job
from snugfit.data.columns import columns_of
from snugfit.data.row_sources import read_rows
from snugfit.errors import UsageError
from snugfit.features.media.samples import INPUTS, LABELS, USUAL
from snugfit.job.job import Task

MISTAKES: dict[str, tuple[Callable[[Path], object], str]] = {
    "folders of splits": (
        lambda at: [pets(at / name, each=1) for name in ("train", "test")],
        r"this folder contains splits. Give one of them: .*test, .*train",
    ),
    "no classes": (lambda at: picture(at / "1.png"), "samples without classes. Put each into a folder"),
    "an empty class": (lambda at: (pets(at, 1), (at / "elk").mkdir()), "elk: no image of this class"),
    "too deep": (lambda at: (pets(at, 1), pets(at / "cat" / "old", 1)), "cat/old: .* and not deeper"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_folders_that_are_no_dataset_are_refused(name: str, tmp_path: Path) -> None:
    made, says = MISTAKES[name]
    made(tmp_path)
    with pytest.raises(UsageError, match=says):
        read_rows(tmp_path)


def test_pictures_in_folders_are_rows(tmp_path: Path) -> None:
    pets(tmp_path, each=2)
    (tmp_path / "cat" / ".DS_Store").write_text("")
    (tmp_path / "cat" / "notes.md").write_text("")
    read = read_rows(tmp_path)
    assert [(Path(row["image"]).name, row["label"]) for row in read] == [
        ("0.png", "cat"), ("1.png", "cat"), ("0.png", "dog"), ("1.png", "dog"),
    ]  # fmt: skip
    assert read.location(3) == read[3]["image"] == str(tmp_path / "dog" / "1.png")
    assert read.class_names("label") == ("cat", "dog")
    assert list(read.notes()) == [
        f"1 files are not images and are ignored, the first is {tmp_path / 'cat' / 'notes.md'}."
    ]
    assert list(pickle.loads(pickle.dumps(read))) == list(read)


def test_beside_pictures_only_metadata_is_a_file_of_rows(tmp_path: Path) -> None:
    pets(tmp_path, each=1)
    (tmp_path / "readme.txt").write_text("Pictures of pets.\n")
    assert [row["label"] for row in read_rows(tmp_path)] == ["cat", "dog"]
    (tmp_path / "metadata.csv").write_text("file_name,label\ncat/0.png,1\n")
    assert list(read_rows(tmp_path)) == [{"file_name": "cat/0.png", "label": "1"}]
    assert read_rows(tmp_path).folder_of(0) == tmp_path


@pytest.mark.parametrize(
    ("columns", "roles"),
    [
        ("image label", "image=image label=label"),
        ("file_name class", "image=file_name label=class"),
        ("img fine_label coarse", "image=img label=fine_label"),
    ],
)
def test_columns_of_pictures_are_found(columns: str, roles: str) -> None:
    job = replace(small_job("vit"), task=Task.IMAGE_CLASSIFICATION)
    rows = read_rows([dict.fromkeys(columns.split(), "x")])
    found = columns_of(rows, job, INPUTS, USUAL, LABELS)
    assert " ".join(f"{role}={column}" for role, column in found.items()) == roles
