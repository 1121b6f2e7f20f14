"""Evaluations: their comparison with the plain model in fp32, and the figures of their calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.measurement.child import results_of
from snugfit.report.measurement import render, short
from snugfit.results.footprint import Footprint, Startup, Timing
from snugfit.results.measurement import Device, Measurement
from snugfit.step.open_step import open_step
from snugfit.step.step import Observer
from snugfit.techniques.recipe import Recipe

BERT = {
    "model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 48, "vocab_size": 96, "max_position_embeddings": 32,
}  # fmt: skip


def small_job(**changes: Any) -> Job:
    fields = {"phase": "evaluate", "batch_size": 2, "sequence_length": 8, **changes}
    return Job(model=Model.from_config(BERT, name="bert"), task="sequence-classification", **fields)


def built(recipe: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    step = open_step(small_job(**changes), Recipe.parse(recipe).setup(), "plain", torch.device("cpu"))
    step.run(0, Observer())
    return step


def test_an_evaluation_in_16_bits_is_compared_with_the_same_weights_in_32() -> None:
    found = results_of(built("bf16_pure"), 0)
    # Other random weights would differ by the logits themselves.
    assert 0 < found["largest_error"] < 0.01


def test_the_plain_recipe_is_not_compared() -> None:
    assert results_of(built("plain"), 0) == {}


def test_wrong_weights_are_an_error_and_a_failed_comparison_is_a_reason() -> None:
    step = built("bf16_pure")
    step.model.classifier.bias.data += 1
    assert results_of(step, 0)["largest_error"] == pytest.approx(1, abs=0.1)
    step = built("bf16_pure")
    step.outputs = lambda: 1 / 0
    assert results_of(step, 0) == {"not_compared": "ZeroDivisionError: division by zero"}


def measured(**changes: Any) -> Measurement:
    seconds = tuple(n / 1000 for n in range(1, 11))
    fields: dict[str, Any] = {
        "job": small_job(),
        "recipe": Recipe.parse("bf16_pure"),
        "loop": "plain",
        "device": Device(type="cpu", name="CPU"),
        "outcome": "ok",
        "footprint": Footprint(
            requested_bytes=None, allocated_bytes=None, reserved_bytes=None, nvml_bytes=None,
            host_bytes=5 << 20,
        ),
        "timing": Timing(
            step_seconds=0.005, spread=0.1, samples_per_second=400, steps=10, seconds=seconds,
            cpu_seconds=tuple(second / 2 for second in seconds),
        ),
        "startup": Startup(
            imports_seconds=1, context_seconds=0, build_seconds=2, first_step_seconds=3
        ),
        "versions": {},
        "when": "",
        "results": {"largest_error": 1e-6, "ids_equal": True, "file_bytes": 3 << 20},
    }  # fmt: skip
    return Measurement(**fields | changes)


def test_calls_have_percentiles_in_wall_and_cpu_seconds() -> None:
    calls = measured().to_json()["calls"]
    assert calls == {
        "setup_seconds": 2,
        "first_call_seconds": 3,
        "median_seconds": 0.005,
        "p90_seconds": 0.009,
        "median_cpu_seconds": 0.0025,
        "p90_cpu_seconds": 0.0045,
        "peak_bytes": 5 << 20,
        "largest_error": 1e-6,
        "ids_equal": True,
        "file_bytes": 3 << 20,
    }
    assert measured(job=replace(small_job(), phase="train")).to_json()["calls"] is None
    assert Measurement.from_json(measured().to_json()) == measured()


@pytest.mark.parametrize("shown", [short, render])
def test_both_reports_have_the_calls(shown: Any) -> None:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(shown(measured()))
    printed = captured.get()
    for line in (
        "set-up       2.00 s",
        "median       5.0 ms, 2.5 ms of CPU",
        "90th perc.   9.0 ms, 4.5 ms of CPU",
        "error        at most 1e-06 from the plain model in fp32, ids equal",
        "             file 3.0 MiB",
    ):
        assert line in printed


def test_a_failed_comparison_is_shown() -> None:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(short(measured(results={"not_compared": "no memory"})))
    assert "error        not compared: no memory" in captured.get()
