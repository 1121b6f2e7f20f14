"""Ways out: after `does not fit`, the cheapest changes of the recipe with which the step fits."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import snugfit
from made_up import LARGER, WAYS, measurement, prediction
from small_models import small_job
from small_runs import bert_job, rows
from snugfit.cli.main import run
from snugfit.errors import OutOfMemory, UsageError
from snugfit.features.ways_out.additions import SEARCH_MESSAGE, about_ways_out, end_with_ways_out
from snugfit.features.ways_out.search import ways_out
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.prediction.predict import predict
from snugfit.report.plan.ways_out import of_plan
from snugfit.report.prediction import render
from snugfit.report.text.terminal import as_text
from snugfit.results.ways_out import WaysOut
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity
from snugfit.units import GIB, MIB
from test_plan_command import choice
from test_plan_command import made_up as planned
from tiers import slow_but

pytestmark = pytest.mark.stored_rehearsals

BERT = ["predict", "bert-large-uncased", "--task", "sequence-classification", "--memory", "512MiB"]


NEAR = (
    choice("bf16 + every_layer", 5 * GIB, 0.08),
    choice("eager + bf16 + every_layer", 5 * GIB - 10 * MIB, 0.16),
)
"""Two recipes that do not fit. The second needs slightly less memory, and is much slower."""

# ---- the search --------------------------------------------------------------------------------------------

JOBS: dict[str, tuple[Job, str, str, float]] = {
    "two techniques together": (
        small_job("llama", 1, {"vocab_size": 32000, "hidden_size": 512}, batch_size=4, sequence_length=256),
        "plain",
        "h200",
        0.75,
    ),
    "half a decoder's activations": (
        small_job("llama", 4, {"vocab_size": 32000, "hidden_size": 512}, batch_size=8, sequence_length=256),
        "plain",
        "h200",
        0.8,
    ),
    "named techniques": (
        small_job("gpt2", 2, {"vocab_size": 32000, "n_embd": 512, "n_positions": 256},
                  batch_size=8, sequence_length=256),
        "bf16 + adamw_fused",
        "rtx4090",
        0.85,
    ),
    "an encoder": (
        Job(model=Model.find("bert-base-uncased"), task="sequence-classification", batch_size=32,
            sequence_length=256),
        "plain",
        "l4",
        0.7,
    ),
    "blocks between which memory is lost": (
        Job(model=Model.find("qwen3-0.6b"), task="causal-lm", batch_size=2, sequence_length=2048),
        "every_layer",
        "rtx4090",
        0.9,
    ),
    "far too little": (
        Job(model=Model.find("qwen3-0.6b"), task="causal-lm", batch_size=8, sequence_length=1024),
        "plain",
        "t4",
        0.25,
    ),
}  # fmt: skip


@pytest.mark.whole
@pytest.mark.parametrize("name", slow_but(JOBS, 1))
def test_each_offered_recipe_is_valid_and_fits(name: str) -> None:
    """It is parsed, checked and predicted again, with the figures that were offered."""
    job, text, gpu, share = JOBS[name]
    asked = predict(job, text, gpu=gpu)
    limit = int(asked.needed_bytes * share)
    found = ways_out(replace(asked, memory_bytes=limit))
    assert 1 <= len(found.ways) <= 3
    assert found.larger_gpu is None
    for one in found.ways:
        recipe = Recipe.parse(one.recipe)
        again = predict(job, recipe, gpu=gpu, memory_bytes=limit)
        assert again.fits
        assert (again.needed_bytes, again.spare_bytes) == (one.needed_bytes, one.spare_bytes)
        assert again.timing is not None
        assert again.timing.step_seconds == pytest.approx(one.step_seconds, rel=1e-6)
        changed = [new for new, old in zip(recipe, asked.recipe, strict=True) if new != old]
        assert tuple(map(str, changed)) == one.changes
        assert all(old.plain or new == old for new, old in zip(recipe, asked.recipe, strict=True))
        assert recipe.setup().micro_batches <= job.batch_size
    exact = [one for one in found.ways if one.fidelity != Fidelity.LEARNS]
    assert [*found.ways][: len(exact)] == exact, "another algorithm comes last"
    assert all((a.slowdown or 0) <= (b.slowdown or 0) + 0.01 for a, b in pairwise(exact))
    assert WaysOut.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.whole
@pytest.mark.slow
def test_changes_of_another_loop_have_its_figures() -> None:
    """The loop's own step needs other bytes than the plain one, for which the search has figures."""
    job, text, gpu, share = JOBS["named techniques"]
    asked = predict(job, text, gpu=gpu, loop="accelerate")
    limit = int(asked.needed_bytes * share)
    found = ways_out(replace(asked, memory_bytes=limit))
    assert found.ways
    for one in found.ways:
        again = predict(job, one.recipe, gpu=gpu, memory_bytes=limit, loop="accelerate")
        assert again.fits
        assert again.needed_bytes == one.needed_bytes
        assert again.timing is not None
        assert again.timing.step_seconds == one.step_seconds


@pytest.mark.whole
def test_without_a_change_that_fits_the_smallest_larger_gpu_is_named() -> None:
    job = small_job("gpt2", 2)
    asked = replace(predict(job, "plain", gpu="t4"), memory_bytes=64 * MIB)
    found = ways_out(asked, beyond=Fidelity.LEARNS)
    assert found.ways == ()
    assert found.larger_gpu is not None
    chosen = find_gpu(found.larger_gpu.gpu)
    there = predict(job, found.larger_gpu.recipe, gpu=chosen)
    assert there.fits
    assert there.needed_bytes == found.larger_gpu.needed_bytes
    smaller = [gpu for gpu in snugfit.all_gpus() if gpu.compute_capability and gpu.memory_bytes]
    assert (chosen.marketed_gb or 0) == min(gpu.marketed_gb or 0 for gpu in smaller)


@pytest.mark.whole
def test_no_combination_is_tried_if_the_weights_alone_are_too_large() -> None:
    asked = replace(predict(small_job("gpt2", 2), "plain", gpu="t4"), memory_bytes=64 * MIB)
    tried: list[str] = []
    assert not ways_out(asked, tell=tried.append).ways
    assert any("one technique" in line for line in tried)
    assert not [line for line in tried if "two techniques" in line or "as many" in line]


def test_a_prediction_that_fits_has_no_way_out() -> None:
    assert ways_out(replace(prediction(), memory_bytes=80 * GIB)) == WaysOut()
    assert ways_out(replace(prediction(), memory_bytes=GIB, gpus=2)) == WaysOut()
    with pytest.raises(UsageError, match="needs a prediction with a memory limit"):
        ways_out(replace(prediction(), memory_bytes=None))


# ---- the text ----------------------------------------------------------------------------------------------


def test_a_plan_in_which_nothing_fits_has_its_least_memory() -> None:
    missed = replace(planned(memory=4 * GIB), front=NEAR, ways_out=LARGER)
    least, larger = of_plan(missed)
    assert least.startswith("The least memory that was found is 5.99 GiB, with 160.0 ms a step: eager + bf16")
    assert "No change of the nearest miss was found that fits" in larger
    assert [*of_plan(planned())] == []


def test_each_change_has_bytes_seconds_and_fidelity() -> None:
    heading, *lines, first = about_ways_out(WAYS, "snugfit plan")
    assert "cheapest first (predicted)" in heading
    assert lines == [
        "1. expandable: 6.0 GiB, 200 ms a step (no slower), exact.",
        "2. chunked_loss: 6.0 GiB, 200 ms a step (+2.0 %), rounds differently, tight: 1.0 MiB to spare.",
        "3. lion: 6.0 GiB, 200 ms a step (-10.0 %), another algorithm.",
    ]
    assert first == "The first one: --recipe expandable"


def test_without_a_change_the_larger_gpu_and_a_plan_are_named() -> None:
    larger, command = about_ways_out(LARGER, "snugfit plan gpt2")
    assert "The smallest GPU that fits is NVIDIA H200, with 140.00 GiB: bf16 takes 90.00 GiB" in larger
    assert command.endswith("snugfit plan gpt2")


def test_a_report_ends_with_them() -> None:
    missed = replace(prediction(), memory_bytes=GIB, ways_out=WAYS)
    assert as_text(render(missed)).splitlines()[-1] == "The first one: --recipe expandable"
    narrow = as_text(render(replace(missed, ways_out=LARGER)), width=60)
    command = narrow[narrow.index("A plan searches") :]
    assert all(line.endswith("\\") for line in command.splitlines()[:-1]), "a command that can be copied"
    several = replace(missed, ways_out=WaysOut(), gpus=2)
    assert "--gpus 2" in as_text(render(several)).splitlines()[-1]


# ---- the commands ------------------------------------------------------------------------------------------


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Invent predictions and ways out; return the techniques that each search keeps."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept: list[Any] = []

    def search(asked: Any, *, keep: Any, **_: Any) -> WaysOut:
        kept.append({str(one) for one in keep.values()})
        return WAYS

    def invent(job: Any, recipe: Any, **how: Any) -> Any:
        return replace(prediction(), job=job, recipe=recipe, memory_bytes=how["memory_bytes"])

    monkeypatch.setattr("snugfit.prediction.predict.predict", invent)
    monkeypatch.setattr("snugfit.features.ways_out.search.ways_out", search)
    return kept


def test_predict_keeps_each_named_technique(searched: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """A default that is named stays too."""
    assert run([*BERT, "--recipe", "bf16 + adamw"]) == 3
    out, err = capsys.readouterr()
    assert searched == [{"bf16", "adamw"}]
    assert "fits with    expandable: 6.0 GiB" in out
    assert "searching changes of 'bf16' that fit" in err


def test_json_contains_the_same(searched: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*BERT, "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert document["ways_out"] == json.loads(json.dumps(WAYS.to_json()))
    assert run([*BERT, "--json", "--compare", "bf16"]) == 3
    first, second = json.loads(capsys.readouterr().out)["predictions"]
    assert first["ways_out"] == document["ways_out"]
    assert second["ways_out"] is None
    assert len(searched) == 1, "the second answer is read from the cache"


@pytest.mark.parametrize("more", [["--no-ways-out"], ["--memory", "80GiB"]])
def test_nothing_is_searched_on_request_or_where_it_fits(
    more: list[str], searched: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run([*BERT, *more])
    assert searched == []
    assert "fits with" not in capsys.readouterr().out


# ---- out of memory -----------------------------------------------------------------------------------------


def exhaust(error: OutOfMemory, device: str = "cuda") -> str:
    """Return the message of a run that ends with this error."""
    with (
        pytest.raises(OutOfMemory) as caught,
        end_with_ways_out(small_job("gpt2", 1), Recipe(), torch.device(device)),
    ):
        raise error
    assert caught.value is error or caught.value.__cause__ is error
    return str(caught.value)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Invent a GPU with 8 GiB; return the predictions of which ways out are searched."""
    asked: list[Any] = []

    def search(missed: Any) -> WaysOut:
        asked.append(missed)
        return WAYS

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr("snugfit.features.ways_out.search.ways_out", search)
    monkeypatch.setattr("snugfit.prediction.predict.predict", lambda *_, **__: prediction())
    return asked


def test_an_out_of_memory_ends_with_the_changes_that_fit_this_gpu(on_gpu: list[Any]) -> None:
    """The prediction fits in 8 GiB and the run did not, so the changes need less than predicted."""
    message = exhaust(OutOfMemory("Memory ran out in step 3 (backward, oom:torch) under 'plain'."))
    assert message.startswith("Memory ran out in step 3")
    assert "1. expandable: 6.0 GiB" in message
    needed = prediction().needed_bytes
    assert needed <= 8 * GIB
    assert on_gpu[0].memory_bytes == int(0.9 * needed)


def test_train_ends_with_them(on_gpu: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The note before the search is an event of the run."""
    events: list[Any] = []

    def exhausted(*_: Any, **__: Any) -> Any:
        raise OutOfMemory("Memory ran out in step 1 (forward, oom:torch) under 'plain'.")

    monkeypatch.setattr("snugfit.frontends.own.run_to_its_end", exhausted)
    monkeypatch.setattr("snugfit.frontends.own.device_of", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    how: dict[str, Any] = {"output_dir": tmp_path, "weights": "random", "foresee": False}
    with pytest.raises(OutOfMemory, match=r"(?s)Memory ran out in step 1.*1\. expandable: 6.0 GiB"):
        snugfit.train(bert_job(), "plain", rows(8), watch=events.append, **how)
    assert {"event": "note", "text": SEARCH_MESSAGE} in events


def test_a_measured_out_of_memory_ends_with_them(
    on_gpu: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit is the measured GPU's memory without the driver's part."""
    dead = measurement(outcome="oom:torch", footprint=None)
    dead = replace(dead, device=replace(dead.device, total_bytes=5 * GIB, reserve_bytes=GIB))
    monkeypatch.setattr("snugfit.measurement.measure.measure", lambda *_, **__: dead)
    monkeypatch.setattr("snugfit.cli.measure.gpu_here", lambda device=None: "NVIDIA H200")
    assert run(["measure", *BERT[1:4]]) == 4
    out, err = capsys.readouterr()
    assert "oom:torch" in out
    assert "1. expandable: 6.0 GiB" in err
    assert on_gpu[0].memory_bytes == 4 * GIB


def test_the_original_error_is_never_hidden(on_gpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Memory ran out in step 3 (backward, oom:torch) under 'plain'."

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a fault of the simulation")

    monkeypatch.setattr("snugfit.prediction.predict.predict", fail)
    assert exhaust(OutOfMemory(text)) == text
    assert exhaust(OutOfMemory(text), "cpu") == text
    of_host = "A worker process of the loader has ended (signal: Killed)."
    assert exhaust(OutOfMemory(of_host)) == of_host
    assert on_gpu == []
