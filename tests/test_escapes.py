"""Text of foreign origin reaches the terminal with its control characters escaped."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from small_runs import bert_job, rows
from snugfit.cli.main import run
from snugfit.cli.streams import SIMILAR, StandardOutput
from snugfit.errors import SnugfitError, UsageError, escape_controls
from snugfit.features.loops.trainer.fit import print_event
from snugfit.report.text.terminal import show_json
from snugfit.report.watching import Watching
from snugfit.training.options import TrainOptions
from snugfit.training.run.dataset import data_of

EVIL = "\x1b]0;owned\x07\r\x9b2J\u202e"
ESCAPED = "\\x1b]0;owned\\x07\\r\\x9b2J\\u202e"


def test_control_characters_become_escapes_and_lines_stay() -> None:
    assert escape_controls(f"a\tb\n{EVIL}ü") == f"a\tb\n{ESCAPED}ü"


def test_labels_of_a_foreign_dataset() -> None:
    """The dataset has more labels than the job."""
    samples = [{**row, "label": f"{EVIL}{index}"} for index, row in enumerate(rows(4))]
    with pytest.raises(UsageError, match="different labels") as refusal:
        data_of(samples, bert_job(), None, columns=None, pack=False, collate=None, options=TrainOptions())
    assert ESCAPED in str(refusal.value)
    assert not set("\x1b\x07\r\x9b\u202e") & set(str(refusal.value))


def test_whatever_an_error_quotes() -> None:
    assert str(SnugfitError(f"the name {EVIL} is not known")) == f"the name {ESCAPED} is not known"


def test_a_commands_messages(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["predict", str(tmp_path / f"no{EVIL}"), "--task", "causal-lm"])
    assert run([f"--{EVIL}"])
    shown = "".join(capsys.readouterr())
    assert not set("\x1b\x07\r\x9b\u202e") & set(shown)


def test_a_runs_lines(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    Watching(1, out=out, bar=False)({"event": "warning", "text": f"left out {EVIL}"})
    print_event({"event": "warning", "text": f"left out {EVIL}"})
    assert out.getvalue() == f"warning: left out {ESCAPED}\n"
    assert capsys.readouterr().out == f"snugfit: left out {ESCAPED}\n"


def test_a_closed_terminal_ends_no_run() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    Watching(1, out=Closed(), bar=False)({"event": "note", "text": "goes on"})


def test_an_encoding_without_a_letter_gets_a_similar_one(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    narrow = StandardOutput(raw, encoding="ascii", errors=SIMILAR)
    narrow.write("4 × 512 → 128 · 中 ─┼│ ▁█\udcff gr\udcc3\udcb6\udcc3\udc9fe×\n")
    narrow.flush()
    # The bytes of a path that Python did not decode are those that the user typed.
    path = "größe".encode()
    assert raw.getvalue() == b"4 x 512 -> 128 - \\u4e2d --| ##\\xff " + path + b"x\n"
    raw.truncate(0)
    raw.seek(0)
    monkeypatch.setattr(sys, "stdout", narrow)
    show_json({"name": "4 × 中"})
    narrow.flush()
    assert json.loads(raw.getvalue()) == {"name": "4 × 中"}
