"""A dataset's lengths, read from files of other tools: all formats agree, and each mistake has its own
message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from snugfit.errors import SnugfitError, UsageError
from snugfit.features.lengths import dataset as reading
from snugfit.features.lengths.dataset import Lengths

KNOWN = [7, 3, 7, 512, 3, 7]
COUNTS = ((3, 2), (7, 3), (512, 1))


FORMS = {
    "plain.txt": "7\n3\n7\n512\n3\n7\n",
    "windows.txt": "\ufeff7\r\n3\r\n\r\n7\r\n512\r\n3\r\n 7 \r\n",
    "one.csv": "tokens\n7\n3\n7\n512\n3\n7\n",
    "several.csv": 'id,text,length\n1,"a, b\n",7\n2,,3\n3,,7\n4,,512\n5,,3\n6,,7\n',
    "tabs.tsv": "id\tlength\n1\t7\n2\t3\n3\t7\n4\t512\n5\t3\n6\t7\n",
    "numbers.jsonl": "7\n3\n7\n512\n3\n7\n",
    "objects.jsonl": "".join(json.dumps({"id": 1, "length": length}) + "\n" for length in KNOWN),
    "ids.jsonl": "".join(json.dumps({"input_ids": [5] * length}) + "\n" for length in KNOWN),
    "list.json": json.dumps(KNOWN),
    "histogram.json": json.dumps({"512": 1, "3": 2, "7": 3, "9": 0}),
}


@pytest.mark.parametrize("name", FORMS)
def test_each_form_says_the_same(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FORMS[name], newline="")
    read = Lengths.read(tmp_path / name)
    assert read.counts == COUNTS
    assert (read.samples, read.tokens, read.shortest, read.median, read.longest) == (6, 539, 3, 7, 512)
    assert read.mean == pytest.approx(539 / 6)


def test_a_histogram_is_its_list() -> None:
    assert Lengths.of(KNOWN) == Lengths.of({3: 2, 7: 3, 512: 1}) == Lengths.of(dict(COUNTS))


def test_a_column_is_named_when_it_is_not_plain(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("source,target\n4,9\n5,9\n")
    assert Lengths.read(table, column="target").counts == ((9, 2),)
    with pytest.raises(UsageError, match=r"which column\? Name one with --column: source, target"):
        Lengths.read(table)
    with pytest.raises(UsageError, match=r"no column 'targt'. Did you mean 'target'"):
        Lengths.read(table, column="targt")


def test_cutting_keeps_the_samples() -> None:
    cut = Lengths.of(KNOWN).cut(5)
    assert cut.counts == ((3, 2), (5, 4))
    with pytest.raises(UsageError, match="truncation: 0 is not a length"):
        Lengths.of(KNOWN).cut(0)


MISTAKES = {
    "none.txt": ("", "contains no lengths"),
    "blank.txt": ("\n\n", "contains no lengths"),
    "word.txt": ("12\nlong\n", "line 2: 'long' is not a length"),
    "text.txt": ("the quick brown fox jumps over the lazy dog and on\n", "Count tokens, not text"),
    "float.txt": ("12.0\n", "line 1: '12.0' is not a length"),
    "octal.txt": ("1_0\n", "'1_0' is not a length"),
    "zero.txt": ("3\n0\n", "line 2: 0 is not a length; a sequence has 1 to"),
    "negative.txt": ("-3\n", "'-3' is not a length"),
    "huge.txt": ("99999999999\n", "99999999999 is not a length"),
    "table.txt": ("1,2\n", "'1,2' is not a length"),
    "headless.csv": ("512\n300\n", "the first line is 512; a table must begin with the names of its columns"),
    "short.csv": ("id,length\n1,5\n2\n", "line 3: 1 cells under 2 columns"),
    "empty.csv": ("", "which column"),
    "quoted.csv": (
        'length\n"' + "9" * 200_000 + '"\n',
        "is not a length; it must be a whole number of tokens",
    ),
    "broken.jsonl": ('{"length": 3}\n{"length": \n', "line 2: not JSON"),
    "lacking.jsonl": ('{"length": 3}\n{"size": 4, "id": 1}\n', "line 2: which column"),
    "nested.jsonl": ('{"length": {"of": 3}}\n', "an object is not a length"),
    "true.jsonl": ("true\n", "True is not a length"),
    "nan.json": ("[NaN]", "nan is not a length"),
    "word.json": ('"long"', "a list of lengths, or a histogram"),
    "count.json": ('{"128": 1.5}', "1.5 is not a number of samples"),
    "less.json": ('{"128": -1}', "-1 is not a number of samples"),
    "key.json": ('{"long": 4}', "'long' is not a length"),
    "twice.json": ('{"4": 1, "4": 2}', "'4' is given twice"),
    "nothing.json": ('{"4": 0}', "contains no lengths"),
    "deep.json": ("[" * 200_000, "nested too deep"),
    "many.json": (
        '{"4": 1000000000000, "5": 1000000000000}',
        "2,000,000,000,000 samples, and 1,000,000,000,000 are allowed",
    ),
    "lengths.parquet": ("PAR1", "lengths can be read from .txt, .csv, .tsv, .jsonl, .json"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_with_its_file(name: str, tmp_path: Path) -> None:
    text, says = MISTAKES[name]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UsageError) as told:
        Lengths.read(path)
    assert str(path) in str(told.value)
    assert says in str(told.value)
    assert len(str(told.value)) < 400 + len(str(path))


def test_what_is_no_file_of_text(tmp_path: Path) -> None:
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "utf16.txt").write_bytes("7\n".encode("utf-16"))
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere.txt")
    for name, says in (
        ("folder.txt", "regular file"),
        ("missing.txt", "no such file"),
        ("dangling.txt", "no such file"),
        ("utf16.txt", "this is UTF-16"),
    ):
        with pytest.raises(SnugfitError, match=says):
            Lengths.read(tmp_path / name)


def test_a_file_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LARGEST_FILE", 10)
    (tmp_path / "large.txt").write_text("512\n" * 10)
    with pytest.raises(UsageError, match=r"40 bytes; a file of lengths may have at most 10.*histogram"):
        Lengths.read(tmp_path / "large.txt")


def test_a_file_without_columns_takes_none(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("7\n")
    with pytest.raises(UsageError, match=r"a \.txt file has no columns"):
        Lengths.read(tmp_path / "plain.txt", column="length")
