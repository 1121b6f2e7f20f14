"""Learning from verified runs, against machines that are invented: what was changed in them must be found."""

from __future__ import annotations

import json
import math
import operator
import random
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest

from snugfit.cli.calibration import remember
from snugfit.comparison.compared_runs import ComparedRun
from snugfit.errors import SnugfitError
from snugfit.evaluation import learn as learning
from snugfit.evaluation.learn import (
    MAX_FACTOR,
    Curve,
    LearnedFactors,
    curve_of,
    fit_factors,
    learn,
    mean_log_error,
    sample_curve,
    slower,
)
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.prediction.rates import Rates, calibration_file, packaged_rates, rates_for
from snugfit.prediction.seconds import step_seconds
from snugfit.rehearsal.device.policy import CudaPolicy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import Trace
from snugfit.techniques.recipe import Recipe
from tiers import slow_but

GPU = find_gpu("h200")
RECIPES = ("plain", "bf16", "bf16 + every_layer", "adamw_loop", "sgd", "bf16 + micro_batches(2)")


@pytest.fixture(autouse=True)
def no_calibration_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNUGFIT_RATES", str(tmp_path / "rates"))


@pytest.fixture(autouse=True)
def curves_sampled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "curve_of", lambda gpu, rates, run: known_curve(str(run.recipe)))


@cache
def known_curve(recipe: str) -> Curve:
    return curve_of(GPU, packaged_rates(GPU), a_run(0, recipe, 1.0))


def llama(*, width: int = 1024, batch: int = 16) -> Job:
    """Two layers: in some recipes its host bounds it on an H200, in others the device."""
    config = {
        "model_type": "llama", "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 2_000,
        "max_position_embeddings": 256,
    }  # fmt: skip
    model = Model.from_config(config, name=f"llama-{width}")
    return Job(model=model, task=Task.CAUSAL_LM, batch_size=batch, sequence_length=256)


@cache
def trace_of(job: Job, recipe: str) -> Trace:
    return rehearse(job, Recipe.parse(recipe).setup(), CudaPolicy())


def seconds(job: Job, recipe: str, rates: Rates, host: float = 1.0) -> float:
    trace = trace_of(job, recipe)
    return step_seconds(trace, GPU, batch_size=job.batch_size, rates=rates, host=host).step_seconds


def a_run(number: int, recipe: str, seen: float, job: Job | None = None) -> ComparedRun:
    job = job or llama()
    return ComparedRun(
        number=number,
        family="llama",
        job=job,
        recipe=Recipe.parse(recipe),
        predicted_step_seconds=seconds(job, recipe, packaged_rates(GPU)),
        outcome="ok",
        step_seconds=seen,
        spread=0.01,
    )


def runs_on(true: Rates, *, noise: float = 0.0, recipes: tuple[str, ...] = RECIPES) -> list[ComparedRun]:
    """These recipes measured on a machine with these rates, where steps vary by so much."""
    rng = random.Random(5)
    return [
        a_run(number, recipe, seconds(llama(), recipe, true) * math.exp(rng.uniform(-noise, noise)))
        for number, recipe in enumerate(recipes)
    ]


@pytest.mark.parametrize(("noise", "within"), slow_but([(0.0, 0.03), (0.05, 0.1)], 1))
def test_a_slower_host_and_device_are_found(noise: float, within: float) -> None:
    known = packaged_rates(GPU)
    true = slower(known, host=1.7, device=1.2)
    found = learn(runs_on(true, noise=noise), GPU, rates=known)
    assert found.changes_rates, found.why_not
    assert found.host == pytest.approx(1.7, rel=within)
    assert found.device == pytest.approx(1.2, rel=within)
    assert mean_log_error(found.after) < max(noise, 0.01) < mean_log_error(found.before)


def test_everything_takes_so_many_times_as_long_on_slower_rates() -> None:
    """The one assumption of the curves: host and device together scale the whole queue. A rate that is
    left out of `slower` breaks it."""
    known = packaged_rates(GPU)
    for recipe in RECIPES:
        whole = seconds(llama(), recipe, slower(known, host=2.0, device=2.0))
        assert whole == pytest.approx(2 * seconds(llama(), recipe, known), rel=0.01)


def test_the_curve_is_the_queue_s_own_seconds() -> None:
    known = packaged_rates(GPU)
    for recipe in ("plain", "bf16"):
        curve = known_curve(recipe)
        for ratio in (0.15, 0.5, 0.93, 1.0, 1.61, 7.0):
            told = math.exp(curve.at(math.log(ratio)))
            assert told == pytest.approx(seconds(llama(), recipe, known, host=ratio), rel=0.005)


def test_what_the_rates_say_already_changes_nothing() -> None:
    known = packaged_rates(GPU)
    found = learn(runs_on(known), GPU, rates=known)
    assert not found.changes_rates
    assert "the rates stay as they are" in found.why_not


def test_where_the_device_bounds_every_run_nothing_is_learned_of_the_host() -> None:
    flat = [Curve((-5.0, 5.0), (height, height)) for height in (-3.0, -2.0, -1.0)]
    host, device = fit_factors(flat, [height + math.log(1.5) for height in (-3.0, -2.0, -1.0)])
    assert math.exp(device) == pytest.approx(1.5, rel=0.01)
    assert abs(host) < 0.01


def test_where_the_host_bounds_every_run_nothing_is_learned_of_the_device() -> None:
    steep = [sample_curve(partial(operator.mul, height)) for height in (0.1, 0.2, 0.3)]
    host, device = fit_factors(steep, [math.log(1.5 * height) for height in (0.1, 0.2, 0.3)])
    assert math.exp(host) == pytest.approx(1.5, rel=0.01)
    assert abs(device) < 0.01


def test_one_run_that_is_off_moves_nothing() -> None:
    known = packaged_rates(GPU)
    true = slower(known, host=1.7, device=1.2)
    runs = runs_on(true)
    runs[2] = replace(runs[2], step_seconds=4 * (runs[2].step_seconds or 0))
    found = learn(runs, GPU, rates=known)
    assert found.host == pytest.approx(1.7, rel=0.03)
    assert found.device == pytest.approx(1.2, rel=0.03)


def test_a_factor_beyond_belief_is_told_and_not_taken_in() -> None:
    known = packaged_rates(GPU)
    found = learn(runs_on(slower(known, host=1.7 * MAX_FACTOR, device=1.0)), GPU, rates=known)
    assert not found.changes_rates
    assert "the host would have to be" in found.why_not
    assert remember(found, [], GPU, known) == found
    assert not calibration_file(GPU).exists()


@pytest.mark.parametrize(
    "spoilt",
    [
        {"contaminated": "another process"},
        {"crowded": "another process took 4 cores"},
        {"outcome": "oom:torch", "step_seconds": None},
        {"spread": 0.6},
    ],
)
def test_too_few_clean_runs_teach_nothing(spoilt: dict[str, object]) -> None:
    runs = runs_on(packaged_rates(GPU), recipes=RECIPES[:3])
    found = learn([*runs[:2], replace(runs[2], **spoilt)], GPU, rates=packaged_rates(GPU))  # type: ignore[arg-type]
    assert (found.host, found.device, found.changes_rates) == (1.0, 1.0, False)
    assert "2 of 3 runs" in found.why_not


# ---- the file --------------------------------------------------------------------------------------------

TAUGHT = LearnedFactors(host=1.7, device=1.2, before=(-0.3, -0.2, -0.4), after=(0.01, 0.0, -0.02))


def test_what_was_learned_is_used_from_then_on_and_says_where_it_is_from() -> None:
    known, runs = rates_for(GPU), runs_on(packaged_rates(GPU), recipes=RECIPES[:3])
    kept = remember(TAUGHT, runs, GPU, rates_for(GPU))
    assert kept.file == str(calibration_file(GPU))
    now = rates_for(GPU)
    assert now.host.forward == pytest.approx(1.7 * known.host.forward)
    assert now.bandwidth == pytest.approx(known.bandwidth / 1.2)
    assert now.source == f"{known.source}; corrected by 3 verified runs"
    assert now.measured == known.measured
    again = remember(TAUGHT, runs, GPU, rates_for(GPU))
    assert rates_for(GPU).host.forward == pytest.approx(1.7**2 * known.host.forward)
    assert rates_for(GPU).source.count("corrected by") == 1
    document = json.loads(Path(again.file or "").read_text())
    assert [entry["recipes"] for entry in document["learned"]] == [[str(run.recipe) for run in runs]] * 2
    assert document["learned"][0]["job_id"] == runs[0].job_id


def test_a_calibration_keeps_its_readings() -> None:
    file = calibration_file(GPU)
    file.parent.mkdir(parents=True)
    readings = [{"corrects": "host"}]
    file.write_text(json.dumps({"rates": rates_for(GPU).to_json(), "readings": readings}))
    remember(TAUGHT, runs_on(packaged_rates(GPU), recipes=RECIPES[:3]), GPU, rates_for(GPU))
    assert json.loads(file.read_text())["readings"] == readings


def test_a_folder_that_cannot_be_written_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("snugfit.cli.calibration.write_document", full)
    with pytest.raises(SnugfitError, match=r"cannot be written \(No space left"):
        remember(TAUGHT, runs_on(packaged_rates(GPU), recipes=RECIPES[:3]), GPU, rates_for(GPU))
    assert rates_for(GPU) == packaged_rates(GPU)


def test_rates_that_were_scaled_are_not_called_measured_by_a_correction() -> None:
    other = find_gpu("a100-80gb")
    remember(TAUGHT, runs_on(packaged_rates(GPU), recipes=RECIPES[:3]), other, rates_for(other))
    assert not rates_for(other).measured
    assert "by the data sheets; corrected by" in rates_for(other).source
