"""Reports show seconds with their spread, beside samples and tokens per second and MFU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from made_up import job, prediction
from snugfit.comparison.recipes import RecipeComparison
from snugfit.job.gpu import find_gpu
from snugfit.planning.fleet.gpu_plans import GpuPlans, OnGpu
from snugfit.planning.plan import Pace
from snugfit.report import compare
from snugfit.report.plan.gpu_plans import render as render_gpus
from snugfit.report.plan.plan import render as render_plan
from snugfit.report.prediction import render
from snugfit.report.text.pace import pace
from snugfit.report.text.terminal import as_text
from snugfit.results.speed import (
    ANY_BOUND,
    CLOUD_VCPU,
    FAST_DESKTOP_CORE,
    GPU_BOUND,
    SCALED,
    THIS_HOST,
    StepSpeed,
    speed_of,
)
from snugfit.results.step_seconds import StepSeconds
from test_plan_command import made_up

RECORDED = Path(__file__).parents[1] / "results" / "recorded-seconds-2026-11-30.json"

TIMING = StepSeconds(
    step_seconds=0.8,
    samples_per_second=5.0,
    device_seconds=0.75,
    host_seconds=0.2,
    phases=(),
    bound="tensor contractions",
    measured_rates=True,
    peak_seconds=0.32,
)


@pytest.mark.parametrize(
    ("bound", "measured", "assumed", "multiples"),
    [
        ("host", True, False, THIS_HOST),
        ("loading", True, False, THIS_HOST),
        ("host", True, True, (FAST_DESKTOP_CORE, CLOUD_VCPU)),
        ("tensor contractions", True, False, GPU_BOUND),
        ("tensor contractions", True, True, GPU_BOUND),
        ("", True, False, ANY_BOUND[0]),
        ("host", False, True, SCALED),
    ],
)
def test_the_range_is_that_of_recorded_steps(
    bound: str, measured: bool, assumed: bool, multiples: tuple[float, float]
) -> None:
    speed = speed_of(2.0, job(), bound=bound, measured_rates=measured, assumed_host=assumed)
    assert (speed.low_seconds, speed.high_seconds) == (2 * multiples[0], 2 * multiples[1])
    assert bool(speed.assumption) is (bound == "host" and measured and assumed)


def test_a_slower_host_may_become_the_bottleneck() -> None:
    """Hosts with 0.9 and 0.4 of the step's seconds: only the first exceeds them on a cloud vCPU."""
    near, far = (
        speed_of(1.0, job(), measured_rates=True, bound="tensor contractions", host_seconds=seconds)
        for seconds in (0.9, 0.4)
    )
    assert near.high_seconds == pytest.approx(0.9 * CLOUD_VCPU)
    assert near.assumption == "fast desktop core to cloud vCPU"
    assert far.high_seconds == GPU_BOUND[1]
    assert not far.assumption
    known = speed_of(1.0, job(), measured_rates=True, host_seconds=0.9, assumed_host=False)
    assert known.high_seconds == ANY_BOUND[0][1]


def test_recorded_steps_lie_within_the_printed_ranges() -> None:
    """Nine in ten of the recorded steps of H200s lie in the ranges, by each bottleneck."""
    rows = [row for row in json.loads(RECORDED.read_text())["rows"] if row["gpu"] == "H200-SXM"]
    for host_bound in (False, True):
        inside = [
            speed.low_seconds <= row["measured"] <= speed.high_seconds
            for row in rows
            if (row["bound"] == "host") is host_bound
            and (speed := speed_of(
                row["shipped"], job(), measured_rates=True, bound=row["bound"], host_seconds=row["host"]
            ))
            and speed.low_seconds and speed.high_seconds
        ]  # fmt: skip
        assert len(inside) >= 30
        assert sum(inside) >= 0.9 * len(inside)


def test_a_pace_in_words() -> None:
    text = pace(speed_of(0.8, job(), measured_rates=False, mfu=0.4), job().words)
    assert text == "about 800.0 ms, 590 ms to 1.2 s; 5.0 samples/s, 2,560 tokens/s, 40 % MFU"
    other = StepSpeed(step_seconds=0.8, samples_per_second=5.0)
    assert pace(other, job().words) == "about 800.0 ms; 5.0 samples/s"


def test_a_prediction_and_a_comparison_say_the_pace() -> None:
    timed = prediction(timing=TIMING)
    text = " ".join(as_text(render(timed)).split())
    assert "A step takes about 800.0 ms, 740 ms to 870 ms; 5.0 samples/s, 2,560 tokens/s, 40 % MFU." in text
    slower = replace(timed, timing=replace(TIMING, step_seconds=1.6, samples_per_second=2.5))
    table = as_text(compare.render([timed, slower]), width=200)
    assert "740 ms to 870 ms" in table
    assert "1,280" in table
    assert "20 %" in table
    assert "MFU" not in as_text(compare.render([prediction(), prediction()]), width=200)
    known = timed.to_json()["timing"]
    assert (known["tokens_per_second"], known["samples_per_second"]) == (2560.0, 5.0)
    assert known["mfu"] == pytest.approx(0.4)
    assert known["low_seconds"] < known["step_seconds"] < known["high_seconds"]
    assert RecipeComparison((timed,)).to_rows()[0]["tokens_per_second"] == 2560.0


def test_a_plan_and_many_gpus_say_the_pace() -> None:
    plan = replace(made_up(), timing=Pace(bound="host", measured_rates=True, peak_seconds=0.02))
    text = " ".join(as_text(render_plan(plan), width=200).split())
    assert "A step takes about 50.0 ms, 35 ms to 93 ms; 80.0 samples/s, 40,960 tokens/s, 40 % MFU." in text
    assert type(plan).from_json(plan.to_json()) == plan
    known = plan.to_json()["timing"]
    assert (known["tokens_per_second"], round(known["mfu"], 3), known["bound"]) == (40_960.0, 0.4, "host")
    assert known["low_seconds"] < known["step_seconds"] < known["high_seconds"]
    assert plan.to_rows()[0]["tokens_per_second"] == 40_960.0
    answer = OnGpu(gpu=find_gpu("l4"), fits=True, choice=plan.best, measured_rates=False, mfu=0.4)
    plans = GpuPlans(job=plan.job, fidelity="rounds", objective="speed", answers=(answer,))
    assert GpuPlans.from_json(plans.to_json()) == plans
    known = plans.to_json()["answers"][0]["timing"]
    assert (known["tokens_per_second"], known["mfu"]) == (40_960.0, 0.4)
    assert known["low_seconds"] < known["step_seconds"] < known["high_seconds"]
    text = " ".join(as_text(render_gpus(plans), width=200).split())
    assert "~50.0 ms a step (37 ms to 77 ms)" in text
    assert "40,960" in text
    assert "40 %" in text
