"""The order of several recipes of each job, random ones or a plan's best, and results that are continued
later.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from made_up import footprint, job, measurement, prediction, timing
from snugfit.cli.main import run as command
from snugfit.errors import SnugfitError, UsageError
from snugfit.features.accuracy import predict_runs
from snugfit.features.accuracy import score as room
from snugfit.features.accuracy.compared_runs import Accuracy, ComparedRun
from snugfit.features.accuracy.files import read, read_rates, write
from snugfit.features.accuracy.markdown import EDGES, document, histogram
from snugfit.features.accuracy.predict_runs import PlannedRecipe, draw_recipes
from snugfit.features.accuracy.ranking import gap, group_by_job, pooled_agreement
from snugfit.features.accuracy.scatter import draw
from snugfit.features.accuracy.tables import render
from snugfit.job.gpu import find_gpu
from snugfit.prediction.rates import packaged_rates
from snugfit.report.text.terminal import as_text
from snugfit.results.step_seconds import StepSeconds
from snugfit.techniques.recipe import Recipe
from snugfit.units import GIB, MIB

H200 = find_gpu("h200")
JOBS = [job(), replace(job(), batch_size=8)]


def seconds(length: float) -> StepSeconds:
    return StepSeconds(
        step_seconds=length, samples_per_second=4 / length, device_seconds=length, host_seconds=0.0,
        phases=(), bound="tensor contractions", measured_rates=True,
    )  # fmt: skip


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """Invent predictions: as many MiB and milliseconds as the recipe's text has letters. The measured time is
    a tenth longer. Return the list of predicted recipes.
    """
    asked: list[Recipe] = []

    def predict(job: Any, recipe: Any, **how: Any) -> Any:
        asked.append(recipe)
        length = len(str(recipe))
        slower = 2.0 if how.get("rates") else 1.0
        return replace(
            prediction(GIB + length * MIB), job=job, recipe=recipe, timing=seconds(slower * length / 1000)
        )

    def measure(job: Any, recipe: Any, **how: Any) -> Any:
        length = len(str(recipe))
        pace = replace(timing(), step_seconds=1.1 * length / 1000)
        return measurement(GIB + length * MIB, job=job, recipe=recipe, timing=pace)

    monkeypatch.setattr(predict_runs, "predict", predict)
    monkeypatch.setattr("snugfit.measurement.measure.measure", measure)
    return asked


# ---- several recipes of each job ---------------------------------------------------------------------------


def test_recipes_of_a_job_are_different_lawful_and_the_same_every_time() -> None:
    one = job()
    found = [recipe for recipe, _ in zip(draw_recipes(one, 3), range(12), strict=False)]
    assert found == [recipe for recipe, _ in zip(draw_recipes(one, 3), range(12), strict=False)]
    assert len(set(found)) == 12
    assert found[0] == Recipe()
    for recipe in found:
        recipe.check(one, (9, 0), installed=False)
    assert found != [recipe for recipe, _ in zip(draw_recipes(one, 4), range(12), strict=False)]


def test_each_job_has_so_many_recipes_that_take_different_bytes(
    answered: list[Recipe], tmp_path: Path
) -> None:
    file = tmp_path / "a.json"
    result = room.accuracy_within_jobs(3, JOBS, 4, H200, room.RunWriter(file))
    assert [run.number for run in result.runs] == list(range(8))
    assert [len(group) for group in group_by_job(result.runs)] == [4, 4]
    for one, group in zip(JOBS, group_by_job(result.runs), strict=True):
        assert group[0].job == one
        assert len({run.predicted.requested_bytes for run in group if run.predicted}) == 4
    assert pooled_agreement(result.runs).tau == 1.0
    assert read(file) == result
    assert "Kendall's tau 1.00 over 12 pairs" in as_text(render(result), width=200)


# ---- the best of each plan ---------------------------------------------------------------------------------


def test_what_the_first_choice_loses_is_told(answered: list[Recipe], tmp_path: Path) -> None:
    def ranked(asked: Any) -> list[PlannedRecipe]:
        if asked.batch_size == 8:
            raise SnugfitError("No recipe could be rehearsed: no shapes")
        order = ("micro_batches(2)", "bf16", "plain")  # the second and the third are faster when measured
        return [
            PlannedRecipe(recipe=Recipe.parse(text), footprint=footprint(GIB), step_seconds=(place + 1) / 100)
            for place, text in enumerate(order)
        ]

    jobs = [job(), replace(job(), batch_size=8)]
    result = room.accuracy_of_best(jobs, 2, ranked, H200, room.RunWriter(tmp_path / "a.json"), seed=None)
    assert [str(run.recipe) for run in result.runs] == ["micro_batches(2)", "bf16", "plain"]
    assert result.runs[2].refused == "No recipe could be rehearsed: no shapes"
    assert gap(group_by_job(result.runs)[0]) == pytest.approx(16 / 4 - 1)
    text = " ".join(as_text(render(result), width=200).split())
    assert "The first choice is 300.0 % slower than the fastest measured one: bf16." in text
    assert "within 5 % of the best of its measured recipes on 0 of 2 jobs" in text


# ---- taken up again ----------------------------------------------------------------------------------------


def test_what_was_only_predicted_can_be_measured_later(answered: list[Recipe], tmp_path: Path) -> None:
    file = tmp_path / "accuracy-seed3-within-job.json"
    room.accuracy_within_jobs(3, JOBS[:1], 3, H200, room.RunWriter(file, measured=False))
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        if line.startswith("measuring 3"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        room.measure_rest(read(file), file=file, tell=tell)
    assert [run.outcome for run in read(file).runs] == ["ok", "ok", None]
    done = room.measure_rest(read(file), file=file)
    assert [run.outcome for run in done.runs] == ["ok"] * 3
    assert done.device == "NVIDIA H200"
    assert read(file) == done


def test_rescoring_predicts_again_and_says_so(answered: list[Recipe], tmp_path: Path) -> None:
    first = room.accuracy_within_jobs(3, JOBS[:1], 3, H200, room.RunWriter(tmp_path / "a.json"))
    again = room.rescore(first, H200, file=tmp_path / "b.json", rates=packaged_rates(H200))
    for before, after in zip(first.runs, again.runs, strict=True):
        assert (after.measured, after.step_seconds, after.when) == (
            before.measured,
            before.step_seconds,
            before.when,
        )
        assert before.predicted_step_seconds
        assert after.predicted_step_seconds == pytest.approx(2 * before.predicted_step_seconds)
        assert after.original == before.predicted
        assert after.original_step_seconds == before.predicted_step_seconds
    assert again.original_versions == first.versions
    page = document([again])
    assert "these are not forecasts" in page
    assert "no forecasts" not in document([first])
    measured = replace(again.runs[0], versions={"torch": "2.11.0"})
    drifted = replace(again, versions={"torch": "2.13.0"}, runs=(measured, *again.runs[1:]))
    assert "Measured with torch 2.11.0: an error may be a difference" in document([drifted])
    third = room.rescore(again, H200, file=tmp_path / "b.json")
    assert third.runs[0].original == first.runs[0].predicted, "the first prediction does not change"
    assert read(tmp_path / "b.json") == third


def test_a_run_that_can_no_longer_be_predicted_says_so(
    answered: list[Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = room.accuracy_within_jobs(3, JOBS[:1], 2, H200, room.RunWriter(tmp_path / "a.json"))

    def predict(*_: Any, **__: Any) -> Any:
        raise KeyError("lost")

    monkeypatch.setattr(predict_runs, "predict", predict)
    again = room.rescore(first, H200, file=tmp_path / "b.json")
    assert [run.complaint for run in again.runs] == ["not predicted: KeyError: 'lost'"] * 2


def test_given_rates_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    file.write_text(json.dumps({"rates": packaged_rates(H200).to_json()}))
    assert read_rates(file, H200) == packaged_rates(H200)
    with pytest.raises(UsageError, match="has the rates of H200-SXM"):
        read_rates(file, find_gpu("v100-16gb"))
    for damage in ("", "{}", '{"rates": 3}', '{"rates": {"gpu": 1}}'):
        file.write_text(damage)
        with pytest.raises(UsageError, match=r"rates\.json is not a calibration"):
            read_rates(file, H200)
    with pytest.raises(UsageError, match="no such file"):
        read_rates(tmp_path / "none.json", H200)


# ---- the command -------------------------------------------------------------------------------------------

MISTAKES = {
    "two questions": (["--top", "3", "--within-job", "3"], "--within-job and --top cannot be used together"),
    "show and rescore": (["--show", "x", "--rescore", "y"], "cannot be used together"),
    "rates alone": (["--rates", "x.json"], "--rates works only with --rescore"),
    "a job alone": (["--job", "x.yaml"], "--job works only with --within-job or --top"),
    "no job": (["--top", "3"], "Add --job FILE"),
    "nothing": ([], "Nothing to compare. Add --job FILE with --top K"),
    "drawn jobs": (["--draw", "3"], "No such option: --draw. Jobs are drawn by `python lab/draw_runs.py`"),
    "drawn jobs on several": (["--gpus", "2"], "For a job of yours: --job FILE --top K."),
    "no plot": (["--show", ".", "--plot", "x.pdf"], ".svg"),
    "one recipe": (["--within-job", "1"], "within-job"),
    "no such file": (["--rescore", "none.json"], "no such file"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, told = MISTAKES[name]
    assert command(["accuracy", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, told in err, list(tmp_path.iterdir())) == ("", True, [])


def test_the_command_draws_and_goes_on(
    answered: list[Recipe],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("snugfit.features.accuracy.command.gpu_here", lambda: None)
    job_file = tmp_path / "small.yaml"
    job_file.write_text("model: bert-base-uncased\ntask: sequence-classification\n")
    alone = ["--workers", "1", "--output", str(tmp_path)]
    drawn = ["accuracy", "--within-job", "2", "--job", str(job_file), "--predict-only", "--gpu", "h200"]
    assert command([*drawn, *alone]) == 0
    file = tmp_path / "accuracy-small-within-job.json"
    assert len(read(file).runs) == 2
    assert command(["accuracy", "--measure", str(file)]) == 2
    assert "has no GPU" in capsys.readouterr().err
    monkeypatch.setattr("snugfit.features.accuracy.command.gpu_here", lambda: "Tesla V100-SXM2-16GB")
    assert command(["accuracy", "--measure", str(file)]) == 2
    assert "the GPU of this machine is Tesla V100" in capsys.readouterr().err
    monkeypatch.setattr("snugfit.features.accuracy.command.gpu_here", lambda: "NVIDIA H200")
    assert command(["accuracy", "--measure", str(file)]) == 0
    assert command(["accuracy", "--rescore", str(file), *alone]) == 0
    assert read(tmp_path / "accuracy-small-within-job-rescored.json").rescored
    plot = tmp_path / "errors.svg"
    assert command(["accuracy", "--show", str(file), "--plot", str(plot), "--json"]) == 0
    assert plot.read_bytes().startswith(b"<?xml")


def test_the_best_of_plans_through_the_command(
    answered: list[Recipe],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from made_up_plans import planned

    monkeypatch.setattr("snugfit.features.accuracy.command.gpu_here", lambda: "NVIDIA H200")
    monkeypatch.setattr("snugfit.planning.search.search.plan", lambda job, **how: planned(how["ranked"]))
    files = [tmp_path / "small.yaml", tmp_path / "large.yaml"]
    for batch, file in enumerate(files, 1):
        text = f"model: bert-base-uncased\ntask: sequence-classification\nbatch_size: {batch}\n"
        file.write_text(text)
    named = [part for file in files for part in ("--job", str(file))]
    command(["accuracy", "--top", "3", *named, "--output", str(tmp_path)])
    result = read(tmp_path / "accuracy-small-large-top3.json")
    assert [str(run.recipe) for run in result.runs] == ["bf16", "bf16 + every_layer", "plain"] * 2
    assert len(group_by_job(result.runs)) == 2
    assert "Kendall's tau" in " ".join(capsys.readouterr().out.split())


# ---- the page ----------------------------------------------------------------------------------------------


def drawn(error: float, number: int = 0, **changes: Any) -> ComparedRun:
    whole = ComparedRun(
        number=number,
        family="bert",
        job=job(),
        recipe=Recipe(),
        predicted=footprint(),
        fits=True,
        predicted_step_seconds=0.1 * (1 + error),
        outcome="ok",
        measured=footprint(),
        step_seconds=0.1,
        bound="host",
    )
    return replace(whole, **changes)


def test_every_error_is_in_the_histogram_once() -> None:
    errors = [-0.5, -0.31, -0.12, -0.01, 0.001, 0.04, 0.26, 0.3, 2.0]
    lines = histogram([drawn(error) for error in errors]).splitlines()
    bars = [line for line in lines if " %" in line]
    assert len(bars) == len(EDGES) + 1
    assert sum(int(line.split()[-1]) for line in bars) == len(errors)


def test_the_worst_are_listed_with_what_is_known_of_them() -> None:
    runs = (
        drawn(0.01),
        drawn(-0.4, 1, spread=0.21, cause="the loader's own process makes the batches"),
        drawn(0.2, 2, crowded="another process took 3.1 cores"),
    )
    result = Accuracy(seed=5, gpu="NVIDIA H200", device="NVIDIA H200", versions={"torch": "2"}, runs=runs)
    page = document([result])
    worst = page[page.index("### The largest errors") : page.index("## Seed 5")]
    assert worst.index("-40.0") < worst.index("+20.0") < worst.index("+1.0")
    assert "the loader's own process makes the batches; its own steps vary by 21 %" in worst
    assert "the host was crowded: another process took 3.1 cores" in worst
    assert "half of the errors are below 20.0 %" in page


def test_a_picture_needs_a_run() -> None:
    result = Accuracy(
        seed=5, gpu="NVIDIA H200", device="NVIDIA H200", versions={}, runs=(drawn(0.1), drawn(-0.9, 1))
    )
    with pytest.raises(UsageError, match="no run of these results"):
        draw([replace(result, runs=())], "png")


def test_results_of_the_first_schema_are_read(tmp_path: Path) -> None:
    result = Accuracy(seed=5, gpu="NVIDIA H200", device=None, versions={"torch": "2"}, runs=(drawn(0.1),))
    file = tmp_path / "accuracy-seed5.json"
    write(result, file)
    document = json.loads(file.read_text())
    document["schema"] = 1
    for name in ("kind", "rates", "rescored", "original_versions"):
        del document[name]
    for name in ("job_id", "crowded", "cause", "original", "original_step_seconds"):
        del document["runs"][0][name]
    file.write_text(json.dumps(document))
    assert read(file) == result
