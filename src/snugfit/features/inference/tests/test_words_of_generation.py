"""Reports of a generation: calls with tokens per second, and no word of training."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from generating_models import generating_job

from made_up import measurement, prediction, timed
from made_up_plans import planned
from snugfit.features.inference.step import GenerateStep
from snugfit.features.page import headlines, pictures
from snugfit.planning.fleet.gpu_plans import GpuPlans
from snugfit.planning.fleet.prices import Prices
from snugfit.planning.plan import Exclusion, Pace
from snugfit.report import compare, short
from snugfit.report import measurement as measured_report
from snugfit.report import prediction as long_report
from snugfit.report.plan import gpu_plans
from snugfit.report.plan import plan as long_plan
from snugfit.report.plan import short as short_plan
from snugfit.report.text.terminal import as_text
from snugfit.step.step import Outputs
from snugfit.techniques.recipe import Recipe

OF_TRAINING = re.compile(r"\bsteps?\b|\btrain|samples", re.IGNORECASE)


def job() -> Any:
    return generating_job("llama")


def generation() -> Any:
    return replace(timed(prediction()), job=job())


def a_plan() -> Any:
    pace = Pace(bound="host", measured_rates=True, peak_seconds=0.02)
    plan = planned(3, 24 << 30)
    assert plan.best is not None
    smaller = replace(plan.best, recipe="bf16 + every_layer", reserved_bytes=3 << 30, step_seconds=0.06)
    return replace(plan, job=job(), timing=pace, front=(plan.best, smaller))


REPORTS = {
    "prediction": lambda: short.numbers(generation()),
    "verdict": lambda: short.verdict(generation()),
    "comparison": lambda: compare.render([generation(), generation()], details=False),
    "plan": lambda: short_plan.render(a_plan()),
    "plan's front": lambda: long_plan.front(a_plan()),
    "measurement": lambda: measured_report.short(replace(measurement(), job=job())),
    "GPUs": lambda: [
        *gpu_plans.headline(GpuPlans(job=job(), fidelity="rounds", objective="speed", answers=()), Prices())
    ],
    "figures": lambda: headlines.figures_of_plan(a_plan()),
    "chart": lambda: pictures.draw_front(a_plan()).heads,
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_has_no_word_of_training(name: str) -> None:
    shown = REPORTS[name]()
    text = as_text(shown, width=200) if hasattr(shown, "__rich_console__") else str(shown)
    assert not OF_TRAINING.search(text), text


def test_the_words_are_those_of_the_phase() -> None:
    text = " ".join(as_text(short_plan.render(a_plan()), width=200).split())
    assert re.search(r"about [\d.]+ m?s a call .* call time .* sequences/s, [\d,]+ tokens/s", text)
    assert re.search(r"alternative [\d.]+ GiB, [\d.]+ m?s a call", text)
    assert "Measure it: snugfit measure llama --task causal-lm" in text
    evaluation = replace(a_plan(), job=replace(job(), phase="evaluate", phase_settings={}))
    text = " ".join(as_text(short_plan.render(evaluation), width=200).split())
    assert re.search(r"alternative [\d.]+ GiB, [\d.]+ m?s a pass", text)
    # Techniques that only some recipes exclude, and those of other slots, are in the long report alone.
    refused = (
        Exclusion(what="compiled", why="it is measured."),
        Exclusion(what="uncompiled", why="it is measured."),
        Exclusion(what="captured", why="it has a static cache", recipes=48),
        Exclusion(what="lora", why="nothing trains"),
    )
    plan = replace(a_plan(), refused=refused)
    text = " ".join(as_text(short_plan.render(plan), width=200).split())
    assert "left out compiled, uncompiled (it is measured) Measure it:" in text
    trains = replace(plan, job=replace(job(), phase="train", phase_settings={}))
    assert "left out" not in as_text(short_plan.render(trains), width=200)
    assert "A call takes about" in as_text(long_report.render(generation()), width=200)


def test_logits_are_compared_up_to_the_first_different_token() -> None:
    """Later logits of a row belong to other texts, and rows are independent of each other."""
    step = GenerateStep(generating_job("llama"), Recipe.parse("bf16_pure").setup(), torch.device("cpu"))
    plain = Outputs(torch.zeros(3, 2, 4), torch.tensor([[7, 1, 2, 3], [7, 1, 2, 3]]))
    values = torch.zeros(3, 2, 4)
    values[1, 0, 0], values[2, 0, 0], values[2, 1, 0] = 0.5, 9.0, 0.75
    found = step.differences(Outputs(values, torch.tensor([[7, 1, 4, 3], [7, 1, 2, 3]])), plain)
    assert (found["first_different_token"], found["largest_error"], found["ids_equal"]) == (2, 0.75, False)
    assert found["note"].startswith("bfloat16 rounds logits")
    assert step.differences(plain, plain) == {"largest_error": 0.0, "ids_equal": True}
