"""`snugfit guide --modern`: the recipe of a plan for each experiment, and its text."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from made_up_guide import guide_result

from in_roster import needs_techniques
from made_up import footprint, prediction
from snugfit.cli.main import run
from snugfit.features.guide import modern as guide_modern
from snugfit.features.guide import tables
from snugfit.features.guide.modern import FrontRecipe, PlannedJob, with_large_models, with_modern
from snugfit.features.guide.suite import job_of, large_models
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job
from snugfit.planning.plan import Choice, Counts, Plan
from snugfit.report.text.terminal import as_text
from snugfit.results.speed import speed_of
from snugfit.techniques.recipe import Recipe
from snugfit.units import GIB


def on_front(job: Job, recipe: str, gib: float, seconds: float) -> FrontRecipe:
    return FrontRecipe(
        recipe=Recipe.parse(recipe),
        needed_bytes=int(gib * GIB),
        speed=speed_of(seconds, job, measured_rates=False),
    )


def plan_of(job: Job) -> PlannedJob:
    """Return two recipes for every job: a fast and a small one."""
    front = (on_front(job, "fp16 + adamw_fused", 10, 0.1), on_front(job, "fp16 + every_layer", 8, 0.2))
    return PlannedJob(front=front, doubts=("It is made up.",))


def test_each_experiment_gets_the_fastest_recipe_within_its_own_memory() -> None:
    """The made-up experiments take 14 GiB and the context, then half a GiB less each.

    One step takes 0.4 s, and a tenth of a second more each.
    """
    asked: list[Job] = []
    result = guide_result()
    modern = with_modern(result, lambda job: asked.append(job) or plan_of(job))  # type: ignore[func-returns-value]
    assert [job.batch_size for job in asked] == [4, 2], "one plan for each job"
    assert modern.doubts[-1] == "It is made up."
    for row, today in zip(result.rows, modern.modern, strict=True):
        assert row.name == today.name
        room = row.predicted_bytes or result.memory_bytes
        assert today.memory_bytes == room
        assert room
        if room >= 10 * GIB:
            assert today.recipe == "fp16 + adamw_fused"
        elif room >= 8 * GIB:
            assert today.recipe == "fp16 + every_layer"
        else:
            assert (today.recipe, today.why_none) == ("", "no recipe of the plan is as small")
    vanilla, *_ = modern.modern
    assert [(one.slot, one.then, one.now) for one in vanilla.instead] == [
        ("precision", "as_loaded", "fp16"),
        ("optimizer", "adamw", "adamw_fused"),
    ]
    (refused,) = (row for row in modern.modern if row.name == "tf32")
    assert refused.recipe == "fp16 + adamw_fused", "all of the memory may be used"
    assert refused.instead == ()


def test_an_experiment_that_is_already_the_fastest_says_so() -> None:
    needs_techniques("adafactor + adamw_8bit + compiled")
    slow = PlannedJob(front=(on_front(guide_result_job(), "every_layer", 1, 100.0),))
    modern = with_modern(guide_result(), lambda job: slow)
    assert {row.why_none for row in modern.modern if row.name != "tf32"} == {
        "no recipe of the plan is faster in as little memory"
    }


def guide_result_job() -> Job:
    from snugfit.features.guide.suite import suite

    return suite()[0].job()


def test_what_does_not_fit_may_use_the_whole_gpu() -> None:
    result = guide_result()
    too_large = replace(result.rows[0], fits=False, predicted=footprint(40 * GIB))
    modern = with_modern(replace(result, rows=(too_large, *result.rows[1:])), plan_of)
    assert modern.modern[0].memory_bytes == result.memory_bytes
    assert modern.modern[0].recipe == "fp16 + adamw_fused"


def test_large_models_are_valid_and_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each runs on its own GPU; one without a prediction has the reason."""
    needs_techniques("qlora + adafactor + zero2")
    for model in large_models():
        gpu = find_gpu(model.gpu)
        Recipe.parse(model.recipe).check(job_of(model.job), gpu.compute_capability, installed=False)
        assert str(Recipe.parse(model.recipe)) == str(Recipe.parse(str(Recipe.parse(model.recipe))))

    def predict_all(requests: Any, **_: Any) -> Any:
        answers = [prediction(12 * GIB, job=one.job, recipe=Recipe.parse(one.recipe)) for one in requests]
        return ["qlora needs bitsandbytes>=0.45, which is not installed.", *answers[1:]]

    monkeypatch.setattr(guide_modern, "predict_all", predict_all)
    first, *others = with_large_models(guide_result()).large_models
    assert (first.fits, first.speed, first.needed_bytes) == (None, None, None)
    assert "not installed" in first.refused
    assert all(row.needed_bytes and row.needed_bytes > 12 * GIB for row in others)
    text = as_text(tables.render(with_large_models(guide_result())), width=160)
    assert "Large models on one GPU, with DeepSpeed and without" in text
    assert "its own engine is simulated" in text
    assert "not installed" in text


def test_the_tables_say_what_changed_and_by_how_much() -> None:
    result = with_modern(guide_result(), plan_of)
    text = " ".join(as_text(tables.render(result), width=160).split())
    assert "as_loaded -> fp16, adamw -> adamw_fused" in text
    assert "+300.0 %" in text, "0.1 s for the vanilla experiment's 0.4 s"
    (row, *_) = csv.DictReader(StringIO(tables.csv(result)))
    assert (row["recipe_today"], row["bytes_today"]) == ("fp16 + adamw_fused", str(10 * GIB))
    assert float(row["samples_per_second_today"]) == 40.0
    assert "recipe_today" not in tables.csv(guide_result()).splitlines()[0]
    document = json.loads(json.dumps(result.to_json()))
    assert document["modern"][0]["instead"][0] == {"slot": "precision", "then": "as_loaded", "now": "fp16"}


def test_the_command_plans_each_job_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    planned: list[int] = []

    def plan(job: Job, *, gpu: Any, keep: str) -> Plan:
        assert keep == "torch_kernels + uncompiled"
        planned.append(job.batch_size)
        choice = Choice(
            recipe="fp16", requested_bytes=GIB, allocated_bytes=GIB, reserved_bytes=GIB, context_bytes=0,
            step_seconds=0.1, samples_per_second=job.batch_size / 0.1,
        )  # fmt: skip
        counts = Counts(recipes=1, tapes=1, footprints=1, passes=1, replayed=1)
        return Plan(
            job=job, gpu=gpu, memory_bytes=None, fidelity="rounds", objective="speed", front=(choice,),
            best=choice, counts=counts,
        )  # fmt: skip

    monkeypatch.setattr("snugfit.features.guide.run.run", lambda *_, **__: guide_result())
    monkeypatch.setattr("snugfit.cli.plan_cache.plan", plan)
    monkeypatch.setattr(guide_modern, "predict_all", lambda requests, **_: ["not here"] * len(requests))
    command = ["guide", "--modern", "--gpu", "v100-16gb", "--output", str(tmp_path), "--json"]
    assert run(command) == 0
    assert planned == [4, 2]
    document = json.loads(capsys.readouterr().out)
    assert {row["recipe"] for row in document["modern"]} == {"fp16"}
    assert {row["refused"] for row in document["large_models"]} == {"not here"}
    assert "fp16" in (tmp_path / "guide.md").read_text(encoding="utf-8")
