"""The guide's suite and its tables, CSV and bars."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from made_up_guide import guide_result

from in_roster import missing_techniques, needs_techniques
from made_up import prediction
from small_models import small_job
from snugfit.errors import GpuError
from snugfit.features.guide import predictions as ask
from snugfit.features.guide import run as suite_run
from snugfit.features.guide import tables
from snugfit.features.guide.cells import inert
from snugfit.features.guide.feature import Guide
from snugfit.features.guide.inference import BackendRow, InferenceGuide, MemoryOfJob, measured_engines
from snugfit.features.guide.methods import helps, method_lines, stage_lines
from snugfit.features.guide.suite import machines, suite, without_figures
from snugfit.job.gpu import find_gpu
from snugfit.prediction.device import policy_for
from snugfit.prediction.predict import predict
from snugfit.prediction.profile import find_software
from snugfit.report.text.terminal import as_text
from snugfit.step.step import LOOPS
from snugfit.techniques.recipe import Recipe
from snugfit.units import GIB
from test_reference import hold_to_schema
from test_tables import hold_rows_and_figures


def test_every_published_row_and_machine_has_its_place() -> None:
    """17 results on 4 machines; only a machine that names its GPU has software to predict under."""
    needs_techniques("adafactor + adamw_8bit")
    experiments = suite()
    assert experiments[0].name == "vanilla"
    assert len([one for experiment in experiments for one in experiment.published]) == 17
    named = [machine for machine in machines().values() if machine.gpu]
    assert [machine.software for machine in named] == ["published-2022"]
    for machine in named:
        assert find_gpu(str(machine.gpu)).name == machine.gpu
    for experiment in experiments:
        assert str(Recipe.parse(experiment.recipe)) == experiment.recipe
        assert experiment.job().model.name.endswith("bert-large-uncased")


def test_what_helps_what_follows_from_the_rows() -> None:
    needs_techniques("adafactor + adamw_8bit")
    lines = {line.experiment: line for line in method_lines(guide_result())}
    accumulation = lines["accumulation"]
    assert accumulation.memory == pytest.approx(-0.5 / 14.586, rel=1e-3), "half a GiB less than vanilla"
    assert accumulation.speed == pytest.approx(7.75 / 8.86 - 1)
    assert accumulation.speed_from == "published"
    assert helps(accumulation.speed, less_is_better=False) == "No"
    assert helps(accumulation.memory, less_is_better=True) == "Yes"
    assert lines["tf32"].memory is None
    assert {line.speed_from for line in method_lines(guide_result(measured=True))} == {
        "measured",
        "published",
        "",
    } - ({"published"} if lines["tf32"].speed is None else set())
    assert (lines["bf16"].speed_from, lines["bf16"].speed) == ("predicted", pytest.approx(0.4 / 0.9 - 1))


def test_the_guide_s_predicted_speeds_stand_beside_those_published() -> None:
    text = as_text(tables.render(guide_result()), width=200)
    predicted, published = (
        next(line for line in part.splitlines() if line.strip().startswith("vanilla"))
        for part in (text, text[text.index("As published") :])
    )
    assert "10.00" in predicted
    assert "6.5 to 13.5" in predicted
    assert "8.86" in published
    assert "10.00" in published
    assert "+12.9 %" in published
    document = json.loads(json.dumps(guide_result().to_json()))
    assert document["rows"][0]["predicted_speed"]["samples_per_second"] == 10.0
    assert document["rows"][0]["then"][0]["predicted_speed"]["high_seconds"] > 0.4
    (row, *_) = csv.DictReader(StringIO(tables.csv(guide_result())))
    assert float(row["predicted_samples_per_second"]) == 10.0
    assert float(row["predicted_then_samples_per_second_v100"]) == 10.0


def test_the_stages_are_context_weights_and_training() -> None:
    stages = {line.stage.split()[0]: line for line in stage_lines(guide_result())}
    assert stages["context"].predicted_bytes == 600 << 20
    assert stages["weights"].predicted_bytes == (600 << 20) + GIB
    assert dict(stages["training"].published)["v100"] == 14949 << 20


def test_the_guide_says_what_was_refused_and_shows_unnamed_machines() -> None:
    text = as_text(tables.render(guide_result()), width=200)
    assert "tf32: it needs compute capability 8.0" in text
    assert "14,949" in text
    assert "unnamed_c" in text
    assert "Measured on" not in text
    assert "Measured on NVIDIA H200" in as_text(tables.render(guide_result(measured=True)), width=200)


def test_what_the_guide_gives_no_figure_of_gets_none_here() -> None:
    result = guide_result()
    (inductor, *others) = result.without_figures
    assert (inductor.status, inductor.experiment) == ("predicted", "torch.compile")
    assert {line.status for line in others} == {"predicted", "gone"}
    assert not any(line.experiment for line in others)
    rows = {row[0]: row for row in tables.without_figures_grid(result).rows}
    assert rows["torch.compile: inductor"][1] == "predicted"
    assert rows["DeepSpeed: ZeRO-2, CPU offload"][1] == "predicted"
    assert rows["DeepSpeed: ZeRO-3, NVMe offload"][1] == "predicted"
    for line in result.without_figures:
        for recipe in line.instead.split(", ") if "(" not in line.instead else techniques_in(line.instead):
            assert missing_techniques(recipe) or Recipe.parse(recipe)
    without = {line.method: line for line in method_lines(result) if not line.experiment}
    assert set(without) == {"DeepSpeed Zero"}
    assert (without["DeepSpeed Zero"].memory, without["DeepSpeed Zero"].speed) == (None, None)


def techniques_in(text: str) -> list[str]:
    """Return the techniques with settings in a comma-separated text."""
    return [f"{part.strip(' ,)')})" for part in text.split("),")]


def test_a_compiled_row_that_cannot_be_predicted_says_what_to_install() -> None:
    result = guide_result()
    why = "compiled needs triton>=3.5, which is not installed. Try: pip install it"
    rows = tuple(
        replace(row, predicted=None, predicted_speed=None, fits=None, refused=why)
        if row.name == "torch.compile"
        else row
        for row in result.rows
    )
    (named, *_) = tables.without_figures_grid(replace(result, rows=rows)).rows
    assert (named[1], named[3]) == ("not predicted", why)


def test_backends_that_are_named_as_gone_are_gone() -> None:
    """The installed torch's list of backends is the reference."""
    from torch import _dynamo

    there = set(_dynamo.list_backends(exclude_tags=()))
    named = {
        name: line.status
        for line in without_figures()
        if line.chapter == "torch.compile"
        for name in line.name.replace("aot_cudagraphs", "cudagraphs").split(", ")
    }
    assert {name for name, status in named.items() if status == "gone"}.isdisjoint(there)
    assert {name for name, status in named.items() if status != "gone"} <= there


def test_markdown_rows_have_as_many_cells_as_heads() -> None:
    text = tables.markdown(guide_result(measured=True), plot="guide.png")
    assert "![" in text
    for block in text.split("\n\n"):
        widths = {line.replace(r"\|", "").count("|") for line in block.splitlines() if line.startswith("|")}
        assert len(widths) <= 1


def test_the_suite_keeps_refused_rows_and_predicts_only_named_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is one request for each experiment on our GPU, and one for each published row of a named GPU."""
    needs_techniques("adafactor + adamw_8bit")
    asked = []

    def predict(job: Any, recipe: Any, **how: Any) -> Any:
        recipe.check(job, how["gpu"].compute_capability)
        asked.append((how["gpu"].key, how["software"]))
        return prediction(job=job, recipe=recipe)

    monkeypatch.setattr(ask, "predict", predict)
    result = suite_run.run(find_gpu("v100-16gb"), optimizers=True)
    assert asked.count(("V100-SXM2-16", "published-2022")) == 10, "every published row of the V100"
    assert {key for key, _ in asked} == {"V100-SXM2-16"}
    refused = [row for row in result.rows if row.refused]
    newer = [row.name for row in refused if "8.0" in row.refused]
    assert newer == ["tf32", "all together, with bf16 and tf32"]
    assert [row.name for row in refused if row.name not in newer] in ([], ["torch.compile"])
    assert all(row.name in newer or "needs triton" in row.refused for row in refused)
    assert len(result.rows) == len(suite())
    assert {line.optimizer for line in result.per_parameter} >= {"inference", "adamw"}
    asked.clear()
    assert suite_run.run(find_gpu("v100-16gb")) == replace(result, per_parameter=())
    assert len(asked) == len(suite()) + 10 - len(refused), "optimizers are predicted only when asked for"


def test_predictions_of_the_suite_come_in_the_order_of_their_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs_techniques("adafactor + adamw_8bit")
    requests = [
        ask.PredictionRequest(about=one.name, job=one.job(), recipe=one.recipe, gpu=find_gpu("h200"))
        for one in suite()
    ]
    monkeypatch.setattr(ask, "predict", lambda job, recipe, **how: str(recipe))
    heard: list[str] = []
    answers = ask.predict_all(requests, workers=1, tell=heard.append)
    assert answers == [str(Recipe.parse(one.recipe)) for one in requests]
    assert sorted(heard) == sorted(one.about for one in requests)


def test_answers_are_valid_against_the_schema() -> None:
    backend = BackendRow(
        name="eager", guide="For debugging.", state="registered", today="", recipe="plain", needed_bytes=GIB,
        speed=guide_result().rows[0].predicted_speed,
    )  # fmt: skip
    memory = MemoryOfJob(name="training", job="a job", kinds={"gradients": 1})
    backends = InferenceGuide(
        gpu="a GPU",
        job="a job",
        backends=(backend,),
        memory=(memory,),
        versions={"torch": "2.13"},
        measured=measured_engines(),
    )
    printed = {"guide --json": guide_result(measured=True, modern=True), "guide --inference --json": backends}
    hold_to_schema(Guide().documents(), printed.items())


def test_a_spreadsheet_runs_no_cell() -> None:
    """Formulas are escaped, but numbers are not."""
    for formula in ("=HYPERLINK(1)", "+1", "-cmd", "@sum", "\t=1"):
        assert inert(formula) == f"'{formula}"
    assert inert(-0.5) == "-0.5"
    assert inert(None) == ""


def test_csv_has_figures_as_numbers() -> None:
    rows = list(csv.DictReader(StringIO(tables.csv(guide_result()))))
    assert rows[0]["experiment"] == "vanilla"
    assert int(rows[0]["published_bytes_v100"]) == 14949 << 20
    assert float(rows[1]["predicted_change"]) < 0


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("how", [{"measured": True}, {"modern": True}], ids=str)
def test_every_row_keeps_its_name_and_every_figure_is_whole(
    how: dict[str, bool], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_rows_and_figures(lambda: tables.render(guide_result(**how)), width, monkeypatch)


@pytest.mark.parametrize(
    ("name", "why"),
    [("mi300x", "is not a CUDA GPU"), ("k80", "does not run on Tesla K80: compute capability 3.7")],
)
def test_a_gpu_that_no_step_runs_on_is_refused(name: str, why: str) -> None:
    with pytest.raises(GpuError, match=why):
        suite_run.run(find_gpu(name))


def test_torch_of_2022_ran_on_a_gpu_that_today_s_does_not() -> None:
    policy_for(find_gpu("k80"), find_software("published-2022"))


def test_the_software_of_2022_holds_in_every_loop() -> None:
    """The guide ran the Trainer: its step takes the plain loop's memory, the batch's mask included."""
    peaks = {
        loop: predict(small_job("bert", 2), gpu="v100-16gb", loop=loop, software="published-2022").footprint
        for loop in LOOPS
    }
    plain = peaks["plain"]
    assert plain.kinds["gradients"]
    for loop, footprint in peaks.items():
        for kind in ("gradients", "activations"):  # the others scale the loss: a number or two more
            assert abs(footprint.kinds[kind] - plain.kinds[kind]) <= 8, (loop, kind)
