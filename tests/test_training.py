"""The own loop: a run is a function of its seed, independent of faults of its process, loss or memory."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from small_models import small_job
from small_runs import (
    assert_same_weights,
    bert_job,
    events,
    killed_in,
    layers_of,
    losses,
    rows,
    skip_without_packages,
    small_run,
)
from snugfit.errors import ModelError, OutOfMemory, SnugfitError, UsageError
from snugfit.job.job import Job
from snugfit.techniques.recipe import Recipe
from snugfit.training.run.loop import TrainingStep
from snugfit.training.run.run import compare_runs
from snugfit.training.run.train import train
from tiers import crossed, slow_but

pytestmark = pytest.mark.whole

RECIPES = (
    "plain",
    "fp16 + micro_batches(2)",
    "bf16_pure + adafactor",
    "bf16 + every_layer + adamw_fused + workers",
    "micro_batches(4) + adamw_8bit",
    "lora + sgd",
    "adafactor_torch + segments",
    "muon + bf16",
    "host_adamw + bf16 + micro_batches(2)",
    "lion_8bit + micro_batches(2)",
    "bf16_pure + adamw_stochastic",
    "bf16_master + adamw_fused + micro_batches(2)",
    "adamw_4bit + micro_batches(2)",
    "apollo(rank=4, renew=3)",
    "galore(rank=4, update_proj_gap=3)",
    "fp8 + micro_batches(2)",
    "bf16_master + adamw_fused + fused",
)


@dataclass(frozen=True)
class Untouched:
    """The result of an uninterrupted run."""

    model: torch.nn.Module
    losses: dict[int, tuple[float, float, float]]


@cache
def untouched(recipe: str = "plain", *, clip: float | None = 1.0, dropout: bool = True) -> Untouched:
    """Return the reference run that all tests share and none changes."""
    job = bert_job(clip=clip, layers=layers_of(recipe))
    with TemporaryDirectory() as folder:
        done = train(small_run(Path(folder), recipe, job=job if dropout else _without_dropout(job)))
        return Untouched(done.model, losses(Path(folder)))


@pytest.mark.parametrize("recipe", slow_but(RECIPES, 2))
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path, recipe: str) -> None:
    """With dropout, losses, norms, learning rates and weights of the resumed run are equal bit for bit."""
    skip_without_packages(recipe)
    whole = untouched(recipe)
    killed_in(small_run(tmp_path / "killed", recipe, save_steps=5), 8)
    resumed = train(small_run(tmp_path / "killed", recipe, save_steps=5))
    assert events(tmp_path / "killed", "started")[1]["resumed_from"] == 5
    assert losses(tmp_path / "killed") == whole.losses
    assert_same_weights(resumed.model, whole.model)


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, 12))
def test_from_any_step(tmp_path: Path, step: int) -> None:
    killed_in(small_run(tmp_path, save_steps=1), step)
    assert_same_weights(train(small_run(tmp_path, save_steps=1)).model, untouched().model)
    assert losses(tmp_path) == untouched().losses


def test_a_finished_run_is_found_finished(tmp_path: Path) -> None:
    first = train(small_run(tmp_path))
    again = train(small_run(tmp_path))
    assert (again.outcome, again.step) == ("finished", 12)
    assert again.loss == first.loss, "of the last saved step"
    assert_same_weights(first.model, again.model)


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    train(small_run(tmp_path / "one", seed=1))
    train(small_run(tmp_path / "two", seed=2))
    assert losses(tmp_path / "one") != losses(tmp_path / "two")


CHANGES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"recipe": "bf16"}, "asked was 'plain' and is now 'bf16'"),
    ({"seed": 7}, "seed was 42 and is now 7"),
    ({"max_steps": 20}, "max_steps was 12 and is now 20"),
    ({"lr_scheduler_type": "cosine"}, "lr_scheduler_type was 'linear' and is now 'cosine'"),
    ({"job": bert_job(8, clip=1.0)}, "job.batch_size was 4 and is now 8"),
    ({"job": bert_job()}, "job.clip was 1.0 and is now null"),
    ({"samples": rows(41)}, "samples was 42 and is now 41"),
    ({"samples": rows(42, seed=1)}, "the same number of samples, but other samples"),
)


@pytest.fixture(scope="module")
def cut_short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was killed in its fifth step."""
    folder = tmp_path_factory.mktemp("cut short")
    killed_in(small_run(folder, save_steps=2), 5)
    return folder


@pytest.mark.parametrize(("change", "told"), CHANGES)
def test_another_run_is_never_resumed_as_this_one(
    tmp_path: Path, cut_short: Path, change: dict[str, Any], told: str
) -> None:
    shutil.copytree(cut_short, tmp_path, dirs_exist_ok=True)
    with pytest.raises(UsageError, match="checkpoint of another run") as refusal:
        train(small_run(tmp_path, save_steps=2, **change))
    assert told in str(refusal.value)
    assert "--restart" in str(refusal.value)


def test_another_run_begins_anew_where_that_is_said(tmp_path: Path, cut_short: Path) -> None:
    shutil.copytree(cut_short, tmp_path, dirs_exist_ok=True)
    begun = train(small_run(tmp_path, save_steps=2, **CHANGES[2][0]), restart=True)
    assert (begun.outcome, begun.step) == ("finished", 20)
    assert any("before-restart" in path.name for path in tmp_path.iterdir()), "the old one is kept"


def test_adapters_go_on_beside_the_weights_that_they_were_made_for(tmp_path: Path) -> None:
    """Adapters are saved without the base weights, and would otherwise resume on other weights without an
    error."""
    for name, layers in (("one", 2), ("other", 3)):
        job = replace(small_job("bert", layers), batch_size=4, sequence_length=16)
        train(small_run(tmp_path / name, job=job, max_steps=1))
    base = {name: tmp_path / name / "checkpoint-1" for name in ("one", "other")}
    begun = small_run(tmp_path / "run", "lora", save_steps=2)
    killed_in(replace(begun, weights=base["one"]), 5)
    for weights in (None, base["other"]):
        with pytest.raises(UsageError, match="weights was"):
            train(replace(begun, weights=weights))
    moved = tmp_path / "moved"
    base["one"].rename(moved)
    assert train(replace(begun, weights=moved)).outcome == "finished"


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    """transformers would train random weights with only a warning."""
    from safetensors.torch import save_file

    save_file({"h.0.attn.weight": torch.zeros(3)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="has no weights of"):
        train(replace(small_run(tmp_path / "run"), weights=tmp_path))


def test_what_only_keeps_or_watches_may_change(tmp_path: Path) -> None:
    killed_in(small_run(tmp_path, save_steps=2), 5)
    again = train(
        small_run(tmp_path, save_steps=3, logging_steps=1, eval_strategy="steps", save_total_limit=None)
    )
    assert again.outcome == "finished"


def test_a_constant_rate_may_go_on_for_longer(tmp_path: Path) -> None:
    train(small_run(tmp_path / "short", lr_scheduler_type="constant"))
    longer = train(small_run(tmp_path / "short", lr_scheduler_type="constant", max_steps=15))
    whole = train(small_run(tmp_path / "whole", lr_scheduler_type="constant", max_steps=15))
    assert_same_weights(longer.model, whole.model)


def test_a_finished_run_goes_on_when_it_is_made_longer(tmp_path: Path) -> None:
    """Its rate follows the longer schedule from there, and a kill in between changes no number."""
    for name in ("straight", "killed"):
        train(small_run(tmp_path / name))
    longer = {"max_steps": 20, "save_steps": 2}
    straight = train(small_run(tmp_path / "straight", **longer))
    assert (straight.outcome, straight.step) == ("finished", 20)
    rates = {event["step"]: event["learning_rate"] for event in events(tmp_path / "straight", "step")}
    assert rates[13] == pytest.approx(small_run(tmp_path).job.learning_rate * 8 / 20)
    warnings = [event["text"] for event in events(tmp_path / "straight", "warning")]
    assert any("had finished after 12 steps and now continues to 20" in text for text in warnings)
    killed_in(small_run(tmp_path / "killed", **longer), 15)
    assert_same_weights(train(small_run(tmp_path / "killed", **longer)).model, straight.model)
    with pytest.raises(UsageError, match="max_steps was 20 and is now 15"):
        train(small_run(tmp_path / "killed", max_steps=15))


def test_other_software_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_in(small_run(tmp_path, save_steps=2), 5)
    monkeypatch.setattr("snugfit.training.run.run.versions", lambda: {"torch": "1.0"})
    train(small_run(tmp_path, save_steps=2))
    (told, *_) = [event["text"] for event in events(tmp_path, "warning") if "torch was" in event["text"]]
    assert "no longer bit for bit" in told


# ---- micro-batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", slow_but(["micro_batches(4)", "micro_batches(2)"], 1))
def test_micro_batches_equal_the_whole_batch(tmp_path: Path, recipe: str) -> None:
    """The batches have uneven padding, and the last one is smaller. Dropout is off, since it draws other
    masks."""
    job = _without_dropout(bert_job())
    whole = train(small_run(tmp_path / "whole", "sgd", job=job))
    cut = train(small_run(tmp_path / "cut", f"sgd + {recipe}", job=job))
    ours, theirs = losses(tmp_path / "cut"), losses(tmp_path / "whole")
    assert [each[0] for each in ours.values()] == pytest.approx(
        [each[0] for each in theirs.values()], rel=1e-5
    )
    for name, value in cut.model.state_dict().items():
        torch.testing.assert_close(value, whole.model.state_dict()[name], rtol=1e-4, atol=1e-6)


def _without_dropout(job: Job) -> Job:
    from snugfit.job.model import Model

    facts = {**job.model.config, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return replace(job, model=Model.from_config(facts, name="still"))


# ---- NaN and infinity -----------------------------------------------------------------------------------


def _poison(monkeypatch: pytest.MonkeyPatch, step: int, value: float = math.nan) -> None:
    """Make the loss of this step's last micro-batch NaN."""
    plain, count = TrainingStep.take, [0]

    def take(self: TrainingStep, running: Any, *more: Any) -> Any:
        count[0] += 1
        if count[0] == step:
            handle = running.model.register_forward_hook(lambda m, i, out: _spoilt(out, value))
            try:
                return plain(self, running, *more)
            finally:
                handle.remove()
        return plain(self, running, *more)

    monkeypatch.setattr(TrainingStep, "take", take)


def _spoilt(out: Any, value: float) -> Any:
    out.loss = out.loss * value
    return out


@pytest.mark.parametrize("value", slow_but([math.nan, math.inf], 1))
def test_a_loss_that_is_no_number_stops_before_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """Weights stay finite and unchanged. The batch's samples are recorded, and a checkpoint remains."""
    killed_in(small_run(tmp_path / "before"), 4)
    _poison(monkeypatch, 5, value)
    with pytest.raises(
        SnugfitError, match=r"Step 5: The loss is (nan|inf)\. No weight was changed"
    ) as stopped:
        train(small_run(tmp_path / "run"))
    assert stopped.value.exit_code == 1
    written = json.loads((tmp_path / "run" / "nonfinite-step-5.json").read_text())
    assert sum(len(piece) for piece in written["samples"]) == 4
    monkeypatch.undo()
    resumed = train(small_run(tmp_path / "run"))
    assert events(tmp_path / "run", "started")[1]["resumed_from"] == 4
    assert_same_weights(resumed.model, untouched().model)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_gradient_that_is_no_number_stops_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: float | None
) -> None:
    """The loss is finite, but one element of one gradient is not."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[3] = math.inf
        return gradient

    plain = TrainingStep._accumulate

    def accumulate(self: TrainingStep, built: Any) -> Any:
        weight = next(built.model.parameters())
        handle = weight.register_hook(spoil)
        try:
            return plain(self, built)
        finally:
            handle.remove()

    monkeypatch.setattr(TrainingStep, "_accumulate", accumulate)
    with pytest.raises(
        SnugfitError, match=r"Step 1: (A gradient is not a number|The gradients' norm is inf)"
    ):
        train(small_run(tmp_path, job=bert_job(clip=clip)))


def _overflow(gradient: Any) -> Any:
    return gradient * math.inf


def _overflow_unseen(gradient: Any) -> Any:
    """Put infinity into an embedding row that no sample uses, so that later losses stay finite."""
    spoilt = gradient.clone()
    spoilt[-1] = math.inf
    return spoilt


@pytest.mark.parametrize(
    ("policy", "step", "clip", "spoil"),
    slow_but(
        [
            ("stop", 1, None, _overflow),
            ("skip", 5, None, _overflow_unseen),
            ("skip", 12, 1.0, _overflow),
            ("stop", 12, 1.0, _overflow_unseen),
            ("stop", 5, None, _overflow),
            ("stop", 12, None, _overflow),
            ("stop", 5, None, _overflow_unseen),
            ("stop", 5, 1.0, _overflow),
            ("skip", 5, None, _overflow),
        ],
        2,
    ),
)
def test_a_gradient_that_is_read_too_late_is_no_harm(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    step: int,
    clip: float | None,
    spoil: Callable[[Any], Any],
) -> None:
    """Imitate a GPU, where the host does not wait for the gradients.

    The bad update is applied, and the run returns to its last good weights. The second time it stops
    before the update.
    """
    job = bert_job(clip=clip)
    plain, begun = TrainingStep._accumulate, TrainingStep.__init__

    def late(self: TrainingStep, *given: Any) -> None:
        begun(self, *given)
        self.sync_before_update = False

    def accumulate(self: TrainingStep, built: Any) -> Any:
        if next(iter(built.optimizer.state.values()), {"step": 0})["step"] != step - 1:
            return plain(self, built)
        handle = next(built.model.parameters()).register_hook(spoil)
        try:
            return plain(self, built)
        finally:
            handle.remove()

    monkeypatch.setattr(TrainingStep, "__init__", late)
    monkeypatch.setattr(TrainingStep, "_accumulate", accumulate)
    options = {"job": job, "save_steps": 2, "on_nonfinite": policy, "most_skipped_in_a_row": 20}
    if policy == "skip":
        done = train(small_run(tmp_path / "run", **options))
        assert all(value.isfinite().all() for value in done.model.state_dict().values())
        assert done.step == 12
        return
    with pytest.raises(
        SnugfitError, match=rf"Step {step}: (A gradient is not a number|The gradients' norm is (inf|nan))"
    ):
        train(small_run(tmp_path / "run", **options))
    told = [event["text"] for event in events(tmp_path / "run", "warning")]
    assert any("goes back to step" in text for text in told)
    monkeypatch.undo()
    done = train(small_run(tmp_path / "run", **{**options, "on_nonfinite": "stop"}))
    whole = untouched(clip=clip)
    assert losses(tmp_path / "run") == whole.losses
    assert_same_weights(done.model, whole.model)


def test_such_a_step_can_be_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _poison(monkeypatch, 5)
    done = train(small_run(tmp_path, on_nonfinite="skip"))
    assert done.outcome == "finished"
    assert [event["updated"] for event in events(tmp_path, "step")].count(False) == 1
    assert all(value.isfinite().all() for value in done.model.state_dict().values())


def test_too_many_skipped_steps_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scaler detects an overflow in every step."""
    plain = TrainingStep._accumulate

    def overflowing(self: TrainingStep, built: Any) -> Any:
        handle = next(built.model.parameters()).register_hook(_overflow)
        try:
            return plain(self, built)
        finally:
            handle.remove()

    monkeypatch.setattr(TrainingStep, "_accumulate", overflowing)
    with pytest.raises(SnugfitError, match="3 steps in a row"):
        train(small_run(tmp_path, "fp16", most_skipped_in_a_row=3))


# ---- memory ---------------------------------------------------------------------------------------------


def _exhaust(monkeypatch: pytest.MonkeyPatch, step: int, phase: str) -> None:
    """Raise a memory error once, in this phase of this step."""
    plain, count = TrainingStep.take, [0]

    def take(self: TrainingStep, running: Any, *more: Any) -> Any:
        count[0] += 1
        if count[0] != step:
            return plain(self, running, *more)
        if phase == "forward":
            torch.rand(3)  # random numbers of a partial forward pass
            self.phases.phase("forward")
        else:
            plain(self, running, *more)  # weights have changed, so the step must be repeated
            self.phases.phase("update")
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr(TrainingStep, "take", take)


@pytest.mark.parametrize(("step", "phase"), crossed([1, 6], ["forward", "update"]))
def test_memory_runs_out_and_the_step_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, phase: str
) -> None:
    """The run splits the same global batch differently, from the same boundary, without a restart."""
    job, whole = _without_dropout(bert_job(clip=1.0)), untouched("sgd", dropout=False)
    _exhaust(monkeypatch, step, phase)
    asked: list[tuple[str, str]] = []

    def replan(job: Job, recipe: Recipe, cause: str) -> Recipe:
        asked.append((str(recipe), cause))
        return Recipe.parse("sgd + micro_batches(2)")

    done = train(small_run(tmp_path / "run", "sgd", job=job, save_steps=4), replan=replan)
    assert asked == [("sgd", "oom:torch")]
    assert str(done.recipe) == "micro_batches(2) + sgd"
    assert done.step == 12
    taken = [event["step"] for event in events(tmp_path / "run", "step")]
    again = range(1, 13) if phase == "forward" or step == 1 else [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 11, 12]
    assert taken == list(again), "a broken update is repeated from the previous checkpoint"
    for name, value in done.model.state_dict().items():
        torch.testing.assert_close(value, whole.model.state_dict()[name], rtol=1e-4, atol=1e-6)
    monkeypatch.undo()
    resumed = train(small_run(tmp_path / "run", "sgd", job=job))
    assert str(resumed.recipe) == "micro_batches(2) + sgd", "the requested recipe has not changed"


def test_when_no_recipe_is_left_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _exhaust(monkeypatch, 3, "forward")
    with pytest.raises(OutOfMemory, match="step 3") as told:
        train(small_run(tmp_path))
    assert told.value.exit_code == 4
    assert "There is no other recipe to try" in str(told.value)


def test_other_errors_are_no_want_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: TrainingStep, running: Any, *more: Any) -> Any:
        raise ValueError("out of memory, said a file name")

    monkeypatch.setattr(TrainingStep, "take", broken)
    with pytest.raises(ValueError, match="said a file name"):
        train(small_run(tmp_path))


def at_a_path(name: str, **config: Any) -> Job:
    """Return the job with its model in this folder."""
    job = bert_job()
    model = replace(job.model, name=name, origin="path")
    return replace(job, model=replace(model, facts=json.dumps({**json.loads(model.facts), **config})))


def test_a_model_whose_folder_moved_is_the_same(tmp_path: Path) -> None:
    told: list[str] = []
    train(small_run(tmp_path, job=at_a_path("/before"), max_steps=1))
    more = {"max_steps": 2, "lr_scheduler_type": "linear"}
    done = train(
        small_run(tmp_path, job=at_a_path("/after"), **more),
        watch=lambda event: told.append(event.get("text", "")),
    )
    assert done.step == 2
    assert "The model's folder was /before and is now /after; its content is the same." in told
    with pytest.raises(UsageError, match=r"another run: job\.model was"):
        train(small_run(tmp_path, job=at_a_path("/third", hidden_act="relu"), **more))


def test_a_refused_mesh_is_named_with_its_recipe(tmp_path: Path) -> None:
    """The error names the old recipe unchanged, without the GPUs of this run."""
    run = small_run(tmp_path, "bf16")
    before = {**json.loads(json.dumps(run.about(run.recipe))), "asked": "fp16 + tensor(2)"}
    wrong, _ = compare_runs(before, run)
    assert wrong[0] == "asked was 'fp16 + tensor(2)' and is now 'bf16'"


# ---- evaluation -----------------------------------------------------------------------------------------


def test_evaluating_changes_no_number(tmp_path: Path) -> None:
    plain = train(small_run(tmp_path / "plain"))
    judged = train(small_run(tmp_path / "judged", eval_strategy="steps", eval_steps=5))
    evaluated = [event["step"] for event in events(tmp_path / "judged", "evaluated")]
    assert evaluated == [5, 10, 12], "the run's end is evaluated, as in the Trainer"
    assert losses(tmp_path / "judged") == losses(tmp_path / "plain")
    assert_same_weights(judged.model, plain.model)
    assert judged.evaluated
    assert judged.evaluated.accuracy is not None


def test_the_best_model_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from snugfit.training.run.evaluate import EvaluationResult

    told = iter([0.9, 0.5, 0.7, 0.8, 0.6, 0.95])
    monkeypatch.setattr(
        "snugfit.training.run.session.evaluate",
        lambda *given: EvaluationResult(loss=next(told), accuracy=None),
    )
    best = train(
        small_run(tmp_path / "best", eval_strategy="steps", eval_steps=2, load_best_model_at_end=True)
    )
    monkeypatch.undo()
    killed_in(small_run(tmp_path / "four", save_steps=4), 5)
    four = train(small_run(tmp_path / "four", save_steps=4))
    assert best.outcome == "finished"
    assert (tmp_path / "best" / "checkpoint-4").is_dir(), "the best one outlives the limit of two"
    assert four.step == 12
    from safetensors.torch import load_file

    kept = load_file(tmp_path / "best" / "checkpoint-4" / "model.safetensors")
    state = best.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in kept.items())


def test_no_gain_ends_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from snugfit.training.run.evaluate import EvaluationResult

    monkeypatch.setattr(
        "snugfit.training.run.session.evaluate", lambda *given: EvaluationResult(loss=0.5, accuracy=None)
    )
    done = train(small_run(tmp_path, eval_strategy="steps", eval_steps=1, early_stopping_patience=3))
    assert (done.outcome, done.step, done.exit_code) == ("stopped early", 4, 0)


def test_checkpoints_are_what_from_pretrained_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForSequenceClassification

    # An import of DeepSpeed to unwrap the model would fail here.
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setattr("accelerate.utils.other.is_deepspeed_available", lambda: True)
    done = train(small_run(tmp_path))
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint-12")
    assert_same_weights(loaded, done.model)
