"""Shown tables, JSON and commands in the documentation, for `snugfit accuracy` and verified plans."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from made_up_accuracy import a_run
from test_peers import verified

from made_up import measurement, prediction
from snugfit.cli.main import run as run_command
from snugfit.features.accuracy import tables, verified_tables
from snugfit.features.accuracy.compared_runs import Accuracy, ComparedRun
from snugfit.features.accuracy.feature import AccuracyFeature
from snugfit.features.accuracy.markdown import causes
from snugfit.features.accuracy.verify import Verification
from snugfit.results.measurement import GpuClock
from snugfit.techniques.recipe import Recipe
from test_cli import empty_folder, refused
from test_docs import OF_ACCURACY, answered, commands
from test_reference import hold_to_schema
from test_tables import LONG, SHORTER, hold_rows_and_figures

__all__ = ["answered", "empty_folder"]

LOWERED = GpuClock(mean_mhz=1700.4, lowest_mhz=1590, highest_mhz=1980, readings=40, reasons={"power": 0.9})


def _accuracy(kind: str) -> Accuracy:
    runs = tuple(
        a_run(number, 12.3456, 11.9876, recipe=Recipe.parse(text))
        for number, text in enumerate((LONG, SHORTER, "plain"), 1)
    )
    return Accuracy(seed=5, kind=kind, gpu="h200", device="NVIDIA H200", versions={}, runs=runs)


REPORTS = {
    "accuracy": lambda: tables.render(_accuracy("drawn")),
    "accuracy --within-job": lambda: tables.render(_accuracy("within-job")),
    "plan --verify": lambda: verified_tables.grid(
        Verification(gpu="h200", device="NVIDIA H200", runs=_accuracy("top").runs, versions={})
    ),
    "plan --verify, peers": lambda: verified_tables.render(verified(0.1, 0.3, None, 0.2)),
}


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("name", REPORTS)
def test_every_row_keeps_its_name_and_every_figure_is_whole(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_rows_and_figures(REPORTS[name], width, monkeypatch)


def test_the_document_is_that_of_the_schema() -> None:
    run = a_run(0, 0.1, 0.1, clock=LOWERED, measured=measurement().footprint)
    document = Accuracy(seed=1, gpu="NVIDIA H200", device=None, versions={}, runs=(run,))
    hold_to_schema(AccuracyFeature().documents(), [("accuracy --json", document)])


def test_a_page_names_it_as_a_cause() -> None:
    run = ComparedRun.from_json(json.loads(json.dumps(a_run(0, 1.0, 1.1, clock=LOWERED).to_json())))
    assert run.clock == LOWERED
    assert f"the GPU lowered its clock: {LOWERED.fall}" in list(causes(run))


@pytest.mark.parametrize("command", [one for one in commands() if OF_ACCURACY.match(one)])
def test_a_command_of_the_docs_is_understood(
    command: str, answered: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("command", "plan_command"):
        monkeypatch.setattr(f"snugfit.features.accuracy.{module}.gpu_here", lambda: "NVIDIA H200")
    monkeypatch.setattr(
        "snugfit.features.accuracy.peers.predict",
        lambda job, recipe, **_: replace(prediction(), job=job, recipe=recipe),
    )
    assert run_command(shlex.split(command)) == 0, capsys.readouterr().err


MISTAKES = {
    "a show that draws": (["accuracy", "--show", "x.json", "--seed", "3"], "--seed is for new runs"),
    "measured where it lies": (["accuracy", "--measure", "x.json", "--output", "y"], "--output is for new"),
    "predicted again only": (["accuracy", "--rescore", "x.json", "--gpu", "l4"], "--gpu is for new runs"),
    "learning left out": (
        ["plan", "bert-large-uncased", "--no-learn"],
        "--verify no longer changes the calibration.",
    ),
    "a plot in a file": (["accuracy", "--show", "x.json", "--plot", f"{sys.executable}/a.svg"], "is a file"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message_and_exit_2(
    name: str, capsys: pytest.CaptureFixture[str], empty_folder: Path
) -> None:
    words, told = MISTAKES[name]
    assert told in refused(words, capsys, empty_folder)
