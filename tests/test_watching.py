"""The display of a run, during it and at its end, from the journal's events alone."""

from __future__ import annotations

import io
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from small_models import small_job
from small_runs import bert_job, events, small_run
from snugfit import predict
from snugfit.frontends.predicted import run_figures, run_predictor
from snugfit.report.watching import Watching
from snugfit.techniques.recipe import Recipe
from snugfit.training.journal import Event, read_journal
from snugfit.training.predicted import PredictedRun, RunAnswer, compare_with_prediction
from snugfit.training.run.train import train
from snugfit.units import GIB

STEP: dict[str, Any] = {
    "event": "step", "epoch": 0.5, "loss": 0.5, "norm": 1.0, "learning_rate": 1e-4, "updated": True,
    "seconds": 0.1, "stall_seconds": 0.0, "samples": 8, "tokens": 100,
}  # fmt: skip
STARTED = {"event": "started", "job": "m", "recipe": "bf16", "steps": 4, "samples": 9, "resumed_from": None}
FORESEEN = PredictedRun(reserved_bytes=33 * GIB, step_seconds=0.1, peak_seconds=0.04, samples=4, tokens=64)


def shown(*told: dict[str, Any], every: int = 2) -> str:
    out = io.StringIO()
    with Watching(every, out=out, bar=False) as watching:
        for event in told:
            watching(event)
    return out.getvalue()


def test_memory_and_use_stand_beside_what_was_foreseen() -> None:
    text = shown(
        {"event": "foreseen", "recipe": "bf16", **FORESEEN.to_json()},
        STARTED,
        {**STEP, "step": 1, "mfu": 0.3},
        {**STEP, "step": 2, "seconds": 0.3, "mfu": 0.5, "reserved_bytes": int(31.2 * GIB)},
    )
    assert "40.0 samples/s  500 tokens/s  45.0% MFU  31.20 GiB reserved of 33.00 GiB predicted" in text


def test_where_nothing_is_foreseen_nothing_is_claimed() -> None:
    text = shown(STARTED, {**STEP, "step": 2, "reserved_bytes": GIB})
    assert "1.00 GiB reserved" in text
    assert "foreseen" not in text
    assert "MFU" not in text
    why = {"event": "foreseen", "recipe": "plain", "text": "Nothing is foreseen of this run: no GPU 'X'."}
    assert "no GPU 'X'" in shown(why)


def test_the_end_lays_both_side_by_side() -> None:
    ended = {"event": "ended", "outcome": "finished", "step": 4, "reserved_bytes": 32 * GIB}
    foreseen = {"event": "foreseen", "recipe": "bf16", **FORESEEN.to_json()}
    near, far = (shown(foreseen, {**ended, "step_seconds": seconds}) for seconds in (0.11, 0.2))
    assert "memory reserved: 33.00 GiB predicted, 32.00 GiB measured" in near
    assert "a step: 100.0 ms predicted, 110.0 ms measured" in near
    assert "differ by more than a fifth" not in near
    assert "differ by more than a fifth" in far
    assert compare_with_prediction({}, ended) == [], "nothing was predicted"


def test_short_memory_is_told_as_what_it_is() -> None:
    event = {"event": "replanned", "step": 7, "before": "plain", "recipe": "micro_batches(2)"}
    assert "From step 7 the recipe is micro_batches(2)" in shown({**event, "cause": "allocation retries"})
    assert "in step 7 with plain. The step is repeated" in shown({**event, "cause": "oom:torch"})


@pytest.mark.whole
def test_use_is_told_with_each_step(tmp_path: Path) -> None:
    """The utilization counts the tokens of a step at peak speed, relative to its seconds."""
    train(small_run(tmp_path, max_steps=4), predict=lambda job, recipe: FORESEEN)
    (told,) = events(tmp_path, "foreseen")
    assert (told["recipe"], told["reserved_bytes"], told["step_seconds"]) == ("plain", 33 * GIB, 0.1)
    for event in events(tmp_path, "step"):
        assert event["mfu"] == pytest.approx(0.04 * event["tokens"] / 64 / event["seconds"])


@pytest.mark.whole
def test_a_prediction_may_come_while_steps_are_taken(tmp_path: Path) -> None:
    """The journal receives the prediction once it exists, at the latest at the end of the run."""
    in_time: Future[RunAnswer] = Future()

    def came_with(event: Event) -> None:
        if event["event"] == "step" and event["step"] == 2:
            in_time.set_result(FORESEEN)

    train(small_run(tmp_path / "one", max_steps=4), predict=lambda job, recipe: in_time, watch=came_with)
    told = [event["event"] for event in read_journal(tmp_path / "one")]
    assert told.count("foreseen") == 1
    assert told[: told.index("foreseen")].count("step") in (2, 3)
    assert [("mfu" in event) for event in events(tmp_path / "one", "step")][-1]

    late: Future[RunAnswer] = Future()
    began = threading.Timer(0.5, late.set_result, ["nobody knows"])
    began.start()
    train(small_run(tmp_path / "two", max_steps=1), predict=lambda job, recipe: late)
    (told_late,) = events(tmp_path / "two", "foreseen")
    assert told_late["text"] == "nobody knows"


@pytest.mark.whole
def test_on_the_cpu_nothing_is_foreseen(tmp_path: Path) -> None:
    train(small_run(tmp_path, max_steps=2), predict=run_predictor(torch.device("cpu")))
    assert not events(tmp_path, "foreseen")
    assert all("mfu" not in event for event in events(tmp_path, "step"))


def test_on_a_gpu_it_is_the_prediction_for_that_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    job, recipe = replace(small_job("bert", 2), batch_size=4, sequence_length=16), Recipe.parse("bf16")
    names = iter(["NVIDIA H200", "NVIDIA Made Up 9000"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: next(names))
    foresee = run_predictor(torch.device("cuda"))
    found = foresee(job, recipe)
    assert found == run_figures(predict(job, recipe, gpu="h200"))
    why = foresee(job, recipe)
    assert isinstance(why, str)
    assert "Made Up 9000" in why


@pytest.mark.whole
def test_a_recipe_that_follows_is_foreseen_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from snugfit.training import step_logger

    counts = iter(range(99))
    monkeypatch.setattr(step_logger, "retries_of", lambda device: next(counts))
    done = train(
        small_run(tmp_path, max_steps=5),
        replan=lambda job, recipe, cause: Recipe.parse("micro_batches(2)"),
        predict=lambda job, recipe: replace(FORESEEN, reserved_bytes=recipe.setup().micro_batches),
    )
    assert str(done.recipe) == "micro_batches(2)"
    told = [(event["recipe"], event["reserved_bytes"]) for event in events(tmp_path, "foreseen")]
    assert told == [("plain", 1), ("micro_batches(2)", 2)]


def test_the_models_arithmetic_is_counted_once() -> None:
    """Recomputation does not count, and half the tokens count as half the arithmetic."""
    job = replace(small_job("bert", 2), batch_size=4, sequence_length=16)
    plain, again = (
        run_figures(predict(job, recipe, gpu="h200")) for recipe in ("bf16", "bf16 + every_layer")
    )
    assert plain.peak_seconds == again.peak_seconds > 0
    assert (plain.samples, plain.tokens) == (4, 64)
    whole = plain.mfu(1.0, 4, 64)
    assert whole == plain.peak_seconds
    assert plain.mfu(1.0, 4, 32) == pytest.approx(whole / 2)
    assert plain.mfu(0.0, 4, 64) is None
    assert replace(plain, tokens=0).mfu(1.0, 2, 0) == pytest.approx(whole / 2), "by samples, without tokens"


def test_the_arithmetic_is_that_of_the_products() -> None:
    """Multiplied weights take six operations per weight and token (Kaplan et al., 2001.08361).

    Attention takes two products forward, for scores and sums, and five such products backward.
    """
    job = bert_job(4)
    found = run_figures(predict(job, "plain", gpu="h200"))
    config = job.transformers_config()
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    weights = layers * (4 * hidden * hidden + 2 * hidden * inner)
    attention = layers * 14 * job.batch_size * job.sequence_length**2 * hidden
    expected = 6 * weights * 64 + attention
    from snugfit.job.gpu import find_gpu

    assert found.peak_seconds
    assert found.peak_seconds * find_gpu("h200").peak_dense["fp32"] == pytest.approx(expected, rel=0.05)
