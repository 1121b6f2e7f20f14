"""A fitted trainer's checkpoints are complete or absent and resume bit for bit; some events end a run
early."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fitted import (
    assert_same_run,
    classified,
    fitted,
    killed,
    model_of,
    padded,
    quiet,
    spoken,
    trained,
    trainer_of,
)
from small_runs import Killed, assert_same_weights, skip_without_packages
from snugfit import fit
from snugfit.documents import read_document, write_document
from snugfit.errors import SnugfitError, UsageError
from snugfit.training.checkpoint.manifest import verify
from tiers import slow_but

pytestmark = pytest.mark.whole


class At(transformers.TrainerCallback):
    """Call a function at the end of a step."""

    def __init__(self, step: int, do: Any) -> None:
        self.step, self.do = step, do

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == self.step:
            self.do()


def die() -> None:
    raise Killed


def run_of(folder: Path, *, at: At | None = None, recipe: str = "micro_batches(2)", **more: Any) -> Any:
    """Return a fitted trainer with dropout, a random order, a random collator, and a checkpoint every second
    step of ten."""
    wanted: dict[str, Any] = {
        "max_steps": 10, "save_strategy": "steps", "save_steps": 2, "train_sampling_strategy": "random",
        "logging_steps": 3, "seed": 5, **more,
    }  # fmt: skip
    trainer = trainer_of(folder, model_of("bert", layers=1, dropout=0.2), classified(22), **wanted)
    trainer.data_collator = masked
    if at is not None:
        trainer.add_callback(at)
    return fitted(trainer, recipe)


def masked(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A random collator, as for masked language models."""
    batch = padded(samples)
    hidden = torch.rand(batch["input_ids"].shape) < 0.3
    return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, 3)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trained(run_of(tmp_path_factory.mktemp("whole")))


@pytest.mark.parametrize("step", slow_but([7, 6, 3, 9], 1))
def test_a_killed_run_goes_on_bit_for_bit(step: int, whole: Any, tmp_path: Path) -> None:
    """The kills come within the first epoch, after its last step (the sixth), and in the second epoch."""
    killed(run_of(tmp_path, at=At(step, die)))
    resumed = trained(run_of(tmp_path), True)
    assert resumed.snugfit_run is None
    assert_same_run(resumed, whole)
    means = [one.state.log_history[-1]["train_loss"] for one in (resumed, whole)]
    assert means[0] == pytest.approx(means[1], rel=1e-12), "of all steps, not of the resumed ones"


@pytest.mark.parametrize("recipe", slow_but(["bf16_pure + adamw_stochastic", "bf16", "fp8"], 1))
def test_a_run_that_was_killed_twice_goes_on_in_its_precision(recipe: str, tmp_path: Path) -> None:
    """A checkpoint of a resumed run must not contain accelerate's mark of a wrapped model.

    accelerate marks a model that it has wrapped in autocast, and does not wrap a marked model again. An
    update that draws random numbers draws the same ones.
    """
    skip_without_packages(recipe)
    whole = trained(run_of(tmp_path / "whole", recipe=recipe))
    for step in (3, 5):
        cut = run_of(tmp_path / "cut", at=At(step, die), recipe=recipe)
        killed(cut, step > 3 or None)
    resumed = trained(run_of(tmp_path / "cut", recipe=recipe), True)
    assert_same_run(resumed, whole)


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "logged"), [(7, 3), (10, 3), (9, 1), (7, 50)])
def test_the_mean_loss_of_a_resumed_run_is_that_of_all_its_steps(
    steps: int, logged: int, tmp_path: Path
) -> None:
    """transformers divides by the steps of the current call from 5.19 on, and by all steps in older
    versions."""
    whole = run_of(tmp_path / "whole", logging_steps=logged)
    mean = whole.train().training_loss
    cut = run_of(tmp_path / "cut", at=At(steps, die) if steps < 10 else None, logging_steps=logged)
    with contextlib.suppress(Killed):
        cut.train()
    resumed = run_of(tmp_path / "cut", logging_steps=logged)
    done = resumed.train(resume_from_checkpoint=True)
    assert done.training_loss == pytest.approx(mean, rel=1e-12)
    assert resumed.state.global_step == 10
    assert_same_weights(resumed.model, whole.model)
    finished = any("Nothing is left to train" in event.get("text", "") for event in resumed.told)
    assert finished == (steps == 10)
    assert done.metrics["train_loss"] == resumed.state.log_history[-1]["train_loss"] == done.training_loss


@pytest.mark.slow
def test_an_order_by_length_goes_on_too(tmp_path: Path) -> None:
    """transformers draws the order from torch's generator at the start of an epoch."""
    more = {"train_sampling_strategy": "group_by_length", "max_steps": 5}
    ends = trained(run_of(tmp_path / "whole", **more))
    killed(run_of(tmp_path / "cut", at=At(3, die), **more))
    resumed = run_of(tmp_path / "cut", **more)
    torch.manual_seed(99)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
    assert_same_weights(resumed.model, ends.model)


@pytest.mark.slow
def test_a_run_that_nan_ended_goes_on_with_the_numbers_of_its_collator(whole: Any, tmp_path: Path) -> None:
    cut = run_of(tmp_path)
    spoil = cut.model.classifier.register_forward_hook
    cut.add_callback(At(3, lambda: spoil(lambda module, given, out: out * math.nan)))
    with pytest.raises(SnugfitError):
        cut.train()
    assert_same_run(trained(run_of(tmp_path), True), whole)


def test_a_checkpoint_is_whole_and_loads(whole: Any) -> None:
    folder = Path(whole.args.output_dir) / "checkpoint-10"
    assert verify(folder, 10).about["recipe"] == "micro_batches(2)"
    again = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert_same_weights(again, whole.model)


def test_a_broken_checkpoint_is_passed_over_and_told(whole: Any, tmp_path: Path) -> None:
    killed(run_of(tmp_path, at=At(7, die)))
    weights = tmp_path / "checkpoint-6" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    resumed = trained(run_of(tmp_path), True)
    assert any("ignored checkpoint-6" in event.get("text", "") for event in resumed.told)
    assert (tmp_path / "checkpoint-6.broken").is_dir()
    assert_same_weights(resumed.model, whole.model)


def test_what_is_no_checkpoint_of_this_run_is_refused(whole: Any, tmp_path: Path) -> None:
    for missing, said in ((True, "has no checkpoint"), (str(tmp_path / "checkpoint-9"), "has none")):
        with pytest.raises(UsageError, match=said):
            run_of(tmp_path).train(resume_from_checkpoint=missing)
    assert not list(tmp_path.iterdir()), "it is refused before anything is written"
    theirs = Path(whole.args.output_dir) / "checkpoint-10"
    other = run_of(tmp_path, per_device_train_batch_size=8)
    with pytest.raises(UsageError, match="batch_size was 4 and is now 8"):
        other.train(resume_from_checkpoint=str(theirs))


def test_early_stopping_and_the_best_model_go_on(tmp_path: Path) -> None:
    def made(at: At | None = None) -> Any:
        more: dict[str, Any] = {
            "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "max_steps": 12,
            "save_total_limit": 1, "learning_rate": 0.3,
        }  # fmt: skip
        trainer = trainer_of(
            tmp_path, model_of("bert", layers=1), classified(22), save_strategy="steps", save_steps=2,
            more={
                "eval_dataset": classified(8),
                "callbacks": [transformers.EarlyStoppingCallback(early_stopping_patience=3)],
            },
            **more,
        )  # fmt: skip
        if at:
            trainer.add_callback(at)
        return fit(trainer, "plain", watch=quiet)

    killed(made(At(5, die)))
    resumed = trained(made(), True)
    evaluated = [line["eval_loss"] for line in resumed.state.log_history if "eval_loss" in line]
    best = min(evaluated)
    assert resumed.state.best_metric == best
    since = len(evaluated) - 1 - evaluated.index(best)
    assert resumed.state.global_step == 12 or since == 3, (
        "the resumed run continues the count of the patience"
    )
    assert (tmp_path / f"checkpoint-{2 * (evaluated.index(best) + 1)}").is_dir()


@pytest.mark.parametrize(("number", "code"), slow_but([(signal.SIGTERM, 75), (signal.SIGINT, 130)], 1))
def test_a_signal_ends_it_at_a_border(number: int, code: int, whole: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        run_of(tmp_path, at=At(3, lambda: os.kill(os.getpid(), number))).train()
    assert ended.value.code == code
    assert (tmp_path / "checkpoint-3").is_dir()
    resumed = trained(run_of(tmp_path, at=At(5, lambda: os.kill(os.getpid(), signal.SIGUSR1))), True)
    assert (tmp_path / "checkpoint-5").is_dir(), "a checkpoint on demand changes nothing"
    assert_same_weights(resumed.model, whole.model)


@pytest.mark.parametrize("which", ["loss", "gradient"])
def test_no_number_stops_before_the_update(which: str, tmp_path: Path) -> None:
    trainer = run_of(tmp_path, save_strategy="no")
    before: dict[str, Any] = {}

    def poison() -> None:
        before.update({name: value.clone() for name, value in trainer.model.state_dict().items()})
        bias = trainer.model.classifier.bias
        if which == "loss":
            trainer.model.classifier.register_forward_hook(lambda module, given, out: out * float("nan"))
        else:
            bias.register_hook(lambda gradient: gradient * float("inf"))

    trainer.add_callback(At(3, poison))
    with pytest.raises(SnugfitError, match=r"Step 4: .* No weight was changed"):
        trainer.train()
    after = trainer.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert (tmp_path / "nonfinite-step-4.safetensors").is_file()
    assert verify(tmp_path / "checkpoint-3", 3)


def test_two_trainers_do_not_share_a_folder(tmp_path: Path) -> None:
    def second() -> None:
        with pytest.raises(UsageError, match="another training run"):
            run_of(tmp_path).train()

    run_of(tmp_path, at=At(1, second), max_steps=1).train()


def test_adapters_are_kept_and_resumed(tmp_path: Path) -> None:
    def made(at: At | None = None) -> Any:
        trainer = trainer_of(
            tmp_path, model_of("llama"), spoken(), save_strategy="steps", save_steps=1, max_steps=3
        )
        if at:
            trainer.add_callback(at)
        torch.manual_seed(1)
        return fit(trainer, "lora(r=4, targets=q_proj)", watch=quiet)

    first = trained(made())
    assert (tmp_path / "checkpoint-3" / "adapter_model.safetensors").is_file()
    again = made()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert_same_weights(first.model, again.model)


@pytest.mark.parametrize("part", slow_but(["about", "result", "checkpoint"], 1))
def test_a_finished_run_whose_note_is_broken_goes_on_from_its_checkpoints(part: str, tmp_path: Path) -> None:
    """A new start puts its checkpoints aside."""
    run_of(tmp_path, max_steps=2).train()
    note = read_document(tmp_path / "finished.json")
    write_document(tmp_path / "finished.json", {**note, part: [1]})
    again = run_of(tmp_path, max_steps=2)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2
    trained(run_of(tmp_path, max_steps=2))
    assert (tmp_path / "checkpoint-2.before-restart").is_dir()
    assert (tmp_path / "checkpoint-2").is_dir()
