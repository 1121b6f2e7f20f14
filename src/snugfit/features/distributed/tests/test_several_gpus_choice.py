"""The choice of a plan for several GPUs among recipes with similar predicted seconds."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from made_up_judge import MadeUpJudge

from small_models import small_job
from snugfit.features.distributed.plan import search
from snugfit.features.distributed.plan.judge import InFull, Judged
from snugfit.features.distributed.plan.plan import OnGpus, SeveralGpusPlan
from snugfit.features.distributed.plan.report import render
from snugfit.features.distributed.plan.search import best_first, plan_several_gpus
from snugfit.job.gpu import Gpu, find_gpu
from snugfit.job.job import Job
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import on_gpus
from snugfit.units import GIB

JOB = replace(small_job("llama", 12), batch_size=8)
H200 = find_gpu("h200")


class WhereShardsAskMore(MadeUpJudge):
    """Made-up seconds in which keeping gathered weights is a little faster, but keeps the host busy for
    nearly all of the step.
    """

    @classmethod
    def of(cls, job: Job, gpu: Gpu, gpus: int, recipe: Recipe) -> Judged:
        judged, wish = super().of(job, gpu, gpus, recipe), on_gpus(recipe.setup(), gpus).parallel
        is_faster = wish is not None and wish.weights == "sharded"
        return judged._replace(step_seconds=judged.step_seconds * (0.99 if is_faster else 1.0))

    def in_full(self, gpus: int, recipe: Recipe) -> InFull:
        wish = on_gpus(recipe.setup(), gpus).parallel
        share = 0.9 if wish is not None and wish.weights == "sharded" else 0.3
        return super().in_full(gpus, recipe)._replace(host_share=share)


def test_of_what_is_forecast_alike_the_one_that_asks_less_of_the_host_is_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MadeUpJudge, "asked", [])
    monkeypatch.setattr(MadeUpJudge, "states", GIB)
    monkeypatch.setattr(search, "Judge", WhereShardsAskMore)
    plan = plan_several_gpus(JOB, gpu=H200, gpus=2, workers=1)
    (answer,) = plan.answers
    assert plan.fastest == answer
    assert answer.recipe == "ddp(bucket_views=true)"
    assert plan.alternatives[0].recipe == "fsdp(reshard=none)"
    assert plan.alternatives[0].step_seconds == pytest.approx(0.99 * answer.step_seconds)
    why = (
        "'fsdp(reshard=none)' is predicted to be 1.0% faster, but there the host works in 90% of the step "
        "and here in 30%. The host's seconds are the least certain."
    )
    assert answer.why == why
    assert why in render(plan).markdown().replace("\n", " ")
    assert SeveralGpusPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def forecast(recipe: str, milliseconds: float, host: float | None) -> OnGpus:
    return OnGpus(
        gpus=2, recipe=recipe, needed_bytes=1, step_seconds=milliseconds / 1000, samples_per_second=1.0,
        host_share=host,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("forecasts", "chosen", "why"),
    [
        ([("fsdp", 100, 0.9), ("ddp", 102.9, 0.3)], "ddp", "in 90% of the step and here in 30%"),
        ([("fsdp", 100, 0.9), ("ddp", 103.1, 0.3)], "fsdp", ""),
        ([("fsdp", 100, 0.7), ("ddp", 101, 0.1)], "fsdp", ""),
        ([("fsdp", 100, 0.92), ("ddp", 101, 0.88)], "fsdp", ""),
        ([("fsdp", 101, 0.9), ("ddp", 100, 0.3)], "ddp", ""),
        ([("fsdp", 100, 0.3), ("ddp", 100, 0.3)], "fsdp", ""),
        (
            [("bf16 + fsdp", 100, 0.1), ("ddp", 100.4, 0.1)],
            "ddp",
            "too little for the added techniques",
        ),
        ([("bf16 + fsdp", 100, 0.1), ("ddp", 100.6, 0.1)], "bf16 + fsdp", ""),
        ([("fsdp", 100, 0.99), ("hsdp(8)", 101, 0.9), ("ddp", 102, 0.8)], "ddp", "in 80%"),
        ([("bf16 + fsdp", 100, 0.99), ("bf16 + ddp", 101, 0.3), ("ddp", 101.4, 0.3)], "ddp", "in 99%"),
        ([("fsdp", 100, None), ("ddp", 101, None)], "fsdp", ""),
    ],
)
def test_the_answer_is_the_fastest_as_far_as_that_is_known(
    forecasts: list[tuple[str, float, float | None]], chosen: str, why: str
) -> None:
    """A host that is busy for less than three quarters of a step does not matter, nor do small
    differences."""
    answers = [forecast(*one) for one in forecasts]
    first, *others = best_first(answers)
    assert first.recipe == chosen
    assert why in first.why
    assert bool(first.why) is bool(why)
    assert {one.recipe for one in (first, *others)} == {one.recipe for one in answers}
    assert [one.step_seconds for one in others] == sorted(one.step_seconds for one in others)


def test_an_answer_that_is_as_fast_stays_faster_than_on_other_numbers_of_gpus() -> None:
    answers = [forecast("fsdp", 100, 0.9), forecast("ddp", 102, 0.3)]
    assert [best_first(answers, limit)[0].recipe for limit in (0.101, 0.103)] == ["fsdp", "ddp"]


def test_why_groups_of_gpus_share_samples_is_said_first() -> None:
    mesh = replace(forecast("tensor(2)", 101, 0.3), why="groups of 2 GPUs compute each layer together.")
    first, _ = best_first([forecast("fsdp + tensor(2)", 100, 0.9), mesh])
    assert first.why.startswith("groups of 2 GPUs compute each layer together. 'fsdp + tensor(2)' is")
