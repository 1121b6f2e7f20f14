"""Runs with a prediction and a measurement: each is recorded, also a failed one, and compared with the
allowed errors.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from in_roster import needs_techniques
from made_up import footprint, job, measurement, prediction
from snugfit.cli.main import run as command
from snugfit.comparison.compare import compare
from snugfit.errors import RecipeError, RehearsalError, UsageError
from snugfit.features.accuracy import predict_runs
from snugfit.features.accuracy import score as room
from snugfit.features.accuracy.compared_runs import BAND, Accuracy, ComparedRun, error_quantiles
from snugfit.features.accuracy.files import read
from snugfit.features.accuracy.markdown import document
from snugfit.features.accuracy.predict_runs import PlannedRecipe, draw_recipes
from snugfit.features.accuracy.tables import render
from snugfit.job.gpu import find_gpu
from snugfit.report.text.terminal import as_text
from snugfit.results.footprint import Footprint, Moment
from snugfit.techniques.recipe import Recipe
from snugfit.units import GIB

RESULTS = Path(__file__).parents[1] / "results"


# ---- figures of one run -----------------------------------------------------------------------------------


def a_run(**changes: Any) -> ComparedRun:
    """Return a run whose prediction equals its measurement."""
    right = ComparedRun(
        number=3,
        family="bert",
        job=job(),
        recipe=Recipe.parse("bf16 + micro_batches(2)"),
        predicted=footprint(),
        fits=True,
        outcome="ok",
        measured=footprint(),
        versions={"torch": "2.13.0"},
    )
    return replace(right, **changes)


def off_by(share: float, figure: str) -> Footprint:
    seen = footprint()
    return replace(seen, **{figure: round(getattr(seen, figure) / (1 + share))})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"measured": off_by(0.004, "allocated_bytes")}, None),
        ({"measured": off_by(-0.006, "allocated_bytes")}, "allocated -0.60 %"),
        ({"measured": off_by(0.029, "reserved_bytes")}, None),
        ({"measured": off_by(0.031, "reserved_bytes")}, "reserved +3.10 %"),
        ({"measured": off_by(-0.031, "nvml_bytes")}, "nvml -3.10 %"),
        ({"measured": replace(footprint(), nvml_bytes=None)}, "nvml_bytes not measured"),
        ({"predicted": None, "fits": None, "refused": "no shapes"}, "not predicted: no shapes"),
        ({"outcome": "oom:torch", "measured": None}, "the run ended with oom:torch"),
        ({"outcome": "oom:torch", "measured": None, "fits": False}, None),
        ({"outcome": "signal:SEGV", "measured": None, "fits": False}, "the run ended with signal:SEGV"),
        ({"fits": False}, "predicted not to fit, and it did"),
        ({"outcome": None, "measured": None}, None),
        ({"outcome": None, "measured": None, "predicted": None, "refused": "x"}, "not predicted: x"),
    ],
)
def test_a_run_outside_the_band_says_why(changes: dict[str, Any], said: str | None) -> None:
    assert a_run(**changes).complaint == said


def test_results_round_trip_through_json() -> None:
    runs = (
        a_run(doubts=("partly estimated",), passed_over=("bert, lora: no targets",)),
        a_run(number=4, predicted=None, fits=None, refused="no shapes", outcome=None, measured=None),
    )
    result = Accuracy(seed=5, gpu="NVIDIA H200", device=None, versions={"torch": "2.13.0"}, runs=runs)
    text = json.dumps(result.to_json(), allow_nan=False)
    assert Accuracy.from_json(json.loads(text)) == result


def test_steps_count_from_one_and_older_documents_are_read() -> None:
    """An older document counts its steps from 0, without a field for that."""
    moment = footprint().at
    assert moment
    written = footprint().to_json()["at"]
    assert (moment.step, written["step"]) == (3, 3), "the text counts from one too: the peak is in step 3"
    assert Moment.from_json(written) == moment
    older = {name: value for name, value in written.items() if name != "counted_from"}
    assert Moment.from_json({**older, "step": 2}) == moment


def test_quantiles_are_errors_that_were_seen() -> None:
    errors = [share / 100 for share in range(1, 17)]
    assert list(error_quantiles(errors)) == [0.08, 0.15, 0.16]
    assert list(error_quantiles([0.5])) == [0.5, 0.5, 0.5]
    assert list(error_quantiles([])) == [None, None, None]


def test_the_worst_figure_of_a_comparison() -> None:
    seen = replace(measurement(), footprint=off_by(-0.1, "reserved_bytes"))
    foreseen = replace(prediction(), job=seen.job, footprint=footprint())
    worst = compare(foreseen, seen).worst
    assert worst is not None
    assert worst.figure == "reserved_bytes"
    assert worst.error == pytest.approx(-0.1, abs=1e-6)


# ---- predicting, measuring ------------------------------------------------------------------------

H200 = find_gpu("h200")


def ranked(_: Any) -> list[PlannedRecipe]:
    return [PlannedRecipe(recipe=Recipe(), footprint=footprint(), step_seconds=0.1)]


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Invent predictions and measurements that agree. The returned list collects the predicted jobs and
    recipes.
    """
    asked: list[Any] = []

    def predict(job: Any, recipe: Any, **how: Any) -> Any:
        asked.append((job, recipe))
        return replace(prediction(), job=job, recipe=recipe, gpu=how["gpu"], memory_bytes=140 * GIB)

    monkeypatch.setattr(predict_runs, "predict", predict)
    monkeypatch.setattr(
        "snugfit.measurement.measure.measure",
        lambda job, recipe, **how: measurement(job=job, recipe=recipe),
    )
    return asked


def test_every_run_is_kept_as_soon_as_it_ended(
    tmp_path: Path, answered: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, told = tmp_path / "new" / "accuracy-seed4.json", []

    def tell(line: str) -> None:
        told.append(line)
        if line.startswith("measuring 3"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        room.accuracy_of_best([job()] * 5, 1, ranked, H200, room.RunWriter(file, tell=tell), seed=None)
    kept = read(file)
    assert [run.number for run in kept.runs] == [0, 1]
    assert kept.device == "NVIDIA H200"
    assert not kept.outside
    assert list(tmp_path.glob("new/*")) == [file]


def test_a_recipe_that_the_model_refuses_is_passed_over_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = []

    def predict(job: Any, recipe: Any, **how: Any) -> Any:
        offered.append(recipe)
        if len(offered) == 1:
            raise RecipeError("peft knows no targets")
        return replace(prediction(), job=job, recipe=recipe)

    monkeypatch.setattr(predict_runs, "predict", predict)
    (run,) = predict_runs.predict_recipes(1, H200, 1, (0, job()))
    assert offered == [recipe for recipe, _ in zip(draw_recipes(job(), 1), range(2), strict=False)]
    assert run.recipe == offered[1]
    assert len(run.passed_over) == 1
    assert "peft knows no targets" in run.passed_over[0]


@pytest.mark.parametrize("failure", [RehearsalError("an operator\nwithout shapes"), KeyError("lost")])
def test_what_cannot_be_predicted_keeps_its_place(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def predict(*_: Any, **__: Any) -> Any:
        raise failure

    monkeypatch.setattr(predict_runs, "predict", predict)
    writer = room.RunWriter(tmp_path / "a.json", measured=False)
    result = room.accuracy_within_jobs(1, [job()], 2, H200, writer)
    assert [run.number for run in result.outside] == [0, 1]
    assert "\n" not in result.runs[0].refused
    assert str(failure.args[0]).split()[-1] in result.runs[0].refused


def test_a_run_that_cannot_be_measured_keeps_its_place(
    answered: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: Any, **__: Any) -> Any:
        raise UsageError("the GPU is somebody's")

    monkeypatch.setattr("snugfit.measurement.measure.measure", measure)
    run, device = room.measure_run(a_run(outcome=None, measured=None))
    assert (run.outcome, run.message, device) == ("refused", "the GPU is somebody's", None)
    assert run.complaint


DAMAGED = '{"what": "accuracy", "schema": 1, "seed": 1, "gpu": "", "device": "", "versions": {}, "runs": 3}'


@pytest.mark.parametrize(("content", "why"), [
    ("", "not strict JSON"),
    ("[1]", "contains a list"),
    ("{}", "has no key"),
    ('{"seed": 1}', "has no key"),
    ('{"what": NaN}', "not strict JSON"),
    ('{"what": "guide", "schema": 1}', "says 'guide'"),
    ('{"what": "accuracy", "schema": 99}', "of schema 99"),
    ('{"what": "accuracy", "schema": 1}', "it has no 'seed'"),
    ('{"what": "accuracy", "schema": 1, "seed": 1, "gpu": 1, "device": 1, "versions": 1}', "no 'runs'"),
    (DAMAGED, "damaged"),
])  # fmt: skip
def test_a_file_that_is_none_of_ours_is_refused(content: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "accuracy-seed1.json"
    file.write_text(content)
    with pytest.raises(
        UsageError, match=rf"seed1.json is not a result of `snugfit accuracy`: .*{why}.*Name an"
    ):
        read(file)


# ---- the command and its pages -----------------------------------------------------------------------------


def test_without_a_gpu_it_says_what_to_try(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("snugfit.features.accuracy.command.gpu_here", lambda: None)
    folder = tmp_path / "new"
    asked = ["accuracy", "--top", "2", "--job", "small.yaml", "--output", str(folder)]
    assert command(asked) == 2
    assert "--predict-only --gpu NAME" in capsys.readouterr().err
    assert command([*asked, "--predict-only"]) == 2
    assert "Add --gpu NAME" in capsys.readouterr().err
    assert not folder.exists()


def test_the_command_measures_writes_and_judges(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, answered: list[Any]
) -> None:
    monkeypatch.setattr("snugfit.features.accuracy.command.gpu_here", lambda: "NVIDIA H200")
    arguments = ["accuracy", "--within-job", "2", "--seed", "9", "--workers", "1", "--output", str(tmp_path)]
    for batch in (1, 2):
        file = tmp_path / f"batch-{batch}.yaml"
        file.write_text(f"model: bert-base-uncased\ntask: sequence-classification\nbatch_size: {batch}\n")
        arguments += ["--job", str(file)]
    assert command(arguments) == 0
    assert "All 2 runs have allowed errors." in capsys.readouterr().out
    monkeypatch.setattr(
        "snugfit.measurement.measure.measure",
        lambda job, recipe, **how: measurement(8 * GIB, job=job, recipe=recipe),
    )
    assert command([*arguments, "--format", "markdown"]) == 5
    printed = capsys.readouterr()
    assert "2 of 2 runs have larger errors than allowed" in printed.err
    assert "- Run 2: allocated" in printed.out
    assert command(["accuracy", "--show", str(tmp_path), "--format", "markdown"]) == 0
    assert capsys.readouterr().out == printed.out
    assert command(["accuracy", "--show", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seed"] == 9


def test_every_run_is_on_the_page_with_foreign_words_as_data() -> None:
    evil = replace(job().model, name="[a](http://x)|<b>")
    runs = (a_run(), a_run(number=4, job=replace(job(), model=evil), outcome="oom:torch", measured=None))
    result = Accuracy(seed=5, gpu="NVIDIA H200", device="NVIDIA H200", versions={"torch": "2"}, runs=runs)
    page = document([result])
    assert "<b>" not in page
    assert "oom:torch" in page
    assert "| bert-large-uncased: sequence-classification, 4 × 512 |\n| bf16 +" in page
    assert "1 of 2 runs have larger errors than allowed" in as_text(render(result))
    for share in BAND.values():
        assert f"{100 * share:g} %" in page


def test_the_committed_results_make_a_page() -> None:
    files = sorted(RESULTS.glob("accuracy-*.json"))
    for file in files:
        for recipe in re.findall(r'"recipe": "([^"]+)"', file.read_text()):
            needs_techniques(recipe)
    page = document([read(file) for file in files])
    assert page.count("\n## Seed") + page.count("\n## Named jobs") == len(files)
