"""`snugfit guide`: its files, its options and its mistakes."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from made_up_guide import guide_result

from snugfit.cli.main import run
from test_cli import BERT, V100, asked, empty_folder, refused
from test_docs import answered, commands

__all__ = ["answered", "asked", "empty_folder"]


def test_an_output_that_is_a_file_is_refused(capsys: pytest.CaptureFixture[str], empty_folder: Path) -> None:
    assert "file" in refused(["guide", *V100, "--output", sys.executable], capsys, empty_folder)
    assert "csv" in refused(["guide", *V100, "--format", "pdf"], capsys, empty_folder)


def test_the_help_names_defaults_and_pictures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["guide", "--help"]) == 0
    told = capsys.readouterr().out
    assert "[one per core]" in told
    pytest.importorskip("snugfit.features.page", reason="the feature page is not there")
    assert "--html" in told
    assert "--plot" in told


def test_a_prediction_may_be_for_the_software_of_2022(asked: list[Any]) -> None:
    assert run(["predict", *BERT, "--software", "published-2022"]) == 0
    assert asked[0][2]["software"] == "published-2022"


def test_the_guide_writes_its_files_and_says_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], empty_folder: Path
) -> None:
    monkeypatch.setattr("snugfit.features.guide.run.run", lambda *_, **__: guide_result())
    monkeypatch.setattr("snugfit.features.guide.command.picture", lambda *_: b"a picture")
    assert run(["guide", *V100, "--output", "here"]) == 0
    assert "here/guide.png" in capsys.readouterr().out
    assert sorted(path.name for path in (empty_folder / "here").iterdir()) == [
        "guide.csv", "guide.json", "guide.md", "guide.png", "guide.svg",
    ]  # fmt: skip
    assert run(["guide", *V100, "--output", "here", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["what"] == "guide"


@pytest.mark.parametrize(("words", "wanted"), [([], False), (["--optimizers"], True)])
def test_the_guide_predicts_optimizers_on_request(
    words: list[str], wanted: bool, empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        "snugfit.features.guide.run.run", lambda *_, **how: asked.append(how["optimizers"]) or guide_result()
    )
    monkeypatch.setattr("snugfit.features.guide.command.picture", lambda *_: b"a picture")
    assert run(["guide", *V100, "--output", "here", *words]) == 0
    assert asked == [wanted]


def test_measuring_the_guide_without_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], empty_folder: Path
) -> None:
    monkeypatch.setattr("snugfit.features.guide.command.gpu_here", lambda: None)
    assert "has no GPU" in refused(["guide", "--measure"], capsys, empty_folder)


@pytest.mark.parametrize("command", [command for command in commands() if command.startswith("guide ")])
def test_a_command_of_the_docs_is_understood(
    command: str, answered: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--html" in command:
        pytest.importorskip("snugfit.features.page", reason="the feature page is not there")
    monkeypatch.setattr("snugfit.features.guide.command.gpu_here", lambda: "NVIDIA H200")
    monkeypatch.setattr("snugfit.features.guide.run.run", lambda *_, **__: guide_result())
    monkeypatch.setattr("snugfit.features.guide.command.picture", lambda *_: b"a picture")
    monkeypatch.setattr(
        "snugfit.features.guide.inference.predict_all", lambda asked, **_: ["made up"] * len(asked)
    )
    monkeypatch.setattr(
        "snugfit.features.guide.modern.predict_all", lambda asked, **_: ["made up"] * len(asked)
    )
    assert run(shlex.split(command)) == 0, capsys.readouterr().err
