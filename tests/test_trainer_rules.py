"""Rules of `TrainingArguments` that our own loop repeats, beside transformers' code, over edge values.

The expected values come from the Trainer's own arguments, data loader, callbacks and groups. A second
written copy of its rules could be wrong.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback

from small_models import small_job
from small_runs import rows, small_run
from snugfit.errors import SnugfitError, UsageError
from snugfit.frontends import own
from snugfit.frontends.own import options_of
from snugfit.step.build import build_model, decay_groups
from snugfit.techniques.recipe import Recipe
from snugfit.training.options import SCHEDULES
from snugfit.training.run.opening import schedule
from snugfit.training.run.session import is_due

STEPS = 12

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # no weight is updated


def trainer_of(folder: Path, samples: int = 8, **arguments: Any) -> Trainer:
    """Return a Trainer as the reference. It never trains."""
    given = TrainingArguments(
        str(folder / "theirs"),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        learning_rate=1e-3,
        **arguments,
    )
    return Trainer(torch.nn.Linear(1, 1), given, train_dataset=rows(samples))


def rates(scheduler: Any, steps: int) -> list[float]:
    """Return the learning rate of each step, and of two steps after the end."""
    found = []
    for _ in range(steps + 2):
        found.append(scheduler.get_last_lr()[0])
        scheduler.step()
    return found


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)


@pytest.mark.parametrize("steps", [1, 2, STEPS])
@pytest.mark.parametrize("warmup", [0, 1e-9, 0.03, 0.2, 0.5, 0.999, 1, 1.0, 1.5, 1.999, 2.5, STEPS])
def test_the_warm_up_has_as_many_steps(tmp_path: Path, warmup: float, steps: int) -> None:
    if int(warmup) > steps:
        with pytest.raises(UsageError, match=rf"warmup_steps is {warmup:g}.*{steps} step"):
            schedule(small_run(tmp_path, warmup_steps=warmup), optimizer(), steps)
        return
    theirs = trainer_of(tmp_path, warmup_steps=warmup).create_scheduler(steps, optimizer())
    ours = schedule(small_run(tmp_path, warmup_steps=warmup), optimizer(), steps)
    assert rates(ours, steps) == rates(theirs, steps)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 0.2, 3])
def test_a_schedule_has_the_same_rates_to_its_end(tmp_path: Path, kind: str, warmup: float) -> None:
    its_own = {
        "cosine_with_min_lr": {"min_lr": 1e-4},
        "warmup_stable_decay": {"num_decay_steps": 4},
        "cosine_with_restarts": {"num_cycles": 2},
    }
    given = {"lr_scheduler_type": kind, "warmup_steps": warmup, "lr_scheduler_kwargs": its_own.get(kind, {})}
    theirs = trainer_of(tmp_path, **given).create_scheduler(STEPS, optimizer())
    assert rates(schedule(small_run(tmp_path, **given), optimizer(), STEPS), STEPS) == rates(theirs, STEPS)


@pytest.mark.parametrize("drops", [False, True])
def test_epochs_are_as_many_steps(tmp_path: Path, drops: bool) -> None:
    """A step has the batch of one forward pass. Splitting it is our own technique, and changes no number
    of steps."""
    for samples in (4, 7, 8, 9, 43):
        trainer = trainer_of(tmp_path, samples, per_device_train_batch_size=4, dataloader_drop_last=drops)
        loader = trainer.get_train_dataloader()
        for epochs in (1e-6, 0.1, 0.3, 0.5, 1, 1.0001, 7 / 3, 3.0):
            trainer.args.num_train_epochs = epochs
            *_, theirs = trainer.set_initial_training_values(trainer.args, loader)
            given = {"num_train_epochs": epochs, "max_steps": None, "dataloader_drop_last": drops}
            run = small_run(tmp_path, samples=rows(samples), **given)
            assert run.steps(run.order(1)) == run.steps(run.order(2)) == theirs, (samples, epochs)
        assert [len(run.order(1).batch(step)) for step in range(len(loader))] == [
            len(batch) for batch in loader.batch_sampler
        ]


@pytest.mark.parametrize("strategy", ["no", "steps", "epoch"])
def test_the_same_steps_are_evaluated_and_saved(tmp_path: Path, strategy: str) -> None:
    per_epoch = 5
    for every, steps in itertools.product((1, 3, STEPS, 100), (1, 2, STEPS)):
        given: dict[str, Any] = {"eval_strategy": strategy, "save_strategy": strategy}
        arguments = TrainingArguments(
            str(tmp_path), use_cpu=True, eval_steps=every, save_steps=every, **given
        )
        state = TrainerState(max_steps=steps)
        state.compute_steps(arguments, steps)
        evaluated, saved, flow = [], [], DefaultFlowCallback()
        for step in range(1, steps + 1):
            state.global_step, state.epoch = step, step / per_epoch
            control = flow.on_step_end(arguments, state, TrainerControl())
            if step % per_epoch == 0 or step == steps:
                control = flow.on_epoch_end(arguments, state, control)
            evaluated += [step] * control.should_evaluate
            saved += [step] * control.should_save
        ours = [step for step in range(1, steps + 1) if is_due(strategy, every, step, steps, per_epoch)]
        assert (evaluated, saved) == (ours, ours), (every, steps)


@pytest.mark.parametrize("name", ["save_steps", "eval_steps", "logging_steps"])
def test_a_share_of_the_steps_is_refused_by_name(name: str) -> None:
    """The Trainer takes this share of all steps, rounded up. snugfit accepts only a number of steps."""
    state = TrainerState()
    state.compute_steps(TrainingArguments("unused", use_cpu=True, **{name: 0.3}), STEPS)
    assert getattr(state, name) == math.ceil(0.3 * STEPS)
    for given in (0.3, 1.0, 2.5, 0):
        with pytest.raises(
            UsageError, match=rf"{name} is {given}; .*a whole number from 1.*no share of all steps"
        ):
            options_of({name: given})


def test_evaluations_without_a_number_follow_the_lines(tmp_path: Path) -> None:
    theirs = TrainingArguments(str(tmp_path), use_cpu=True, eval_strategy="steps", logging_steps=7)
    assert theirs.eval_steps == 7
    ours = options_of({"eval_strategy": "steps", "logging_steps": 7})
    assert (ours.eval_steps or ours.logging_steps) == 7


def test_smoothed_labels_are_refused_by_name() -> None:
    """Our loop uses the model's own loss."""
    assert TrainingArguments("unused", use_cpu=True, label_smoothing_factor=0.1).label_smoothing_factor
    with pytest.raises(SnugfitError, match="label_smoothing_factor"):
        options_of({"label_smoothing_factor": 0.1})


class Norms(torch.nn.Module):
    """A model with `norm` in its names: within a word, at its end, and alone."""

    def __init__(self) -> None:
        super().__init__()
        for name in (
            "normal_proj",
            "unnormed",
            "norm",
            "final_norm",
            "norm1",
            "q_rmsnorm",
            "out_layernorm",
            "abnorm",
        ):
            self.add_module(name, torch.nn.Linear(2, 2))
        self.by_class = torch.nn.LayerNorm(2)
        self.biased_scale = torch.nn.Parameter(torch.zeros(2))
        self.Norm = torch.nn.Sequential(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "t5", "vit", "norms"])
def test_the_same_weights_decay(tmp_path: Path, family: str) -> None:
    model = (
        Norms()
        if family == "norms"
        else build_model(small_job(family, 2), Recipe.parse("plain").setup(), torch.device("cpu"))
    )
    decaying = set(trainer_of(tmp_path).get_decay_parameter_names(model))
    theirs = {name for name, weight in model.named_parameters() if name in decaying}
    ours = {id(weight) for weight in decay_groups(model)[0]["params"]}
    assert {name for name, weight in model.named_parameters() if id(weight) in ours} == theirs


def test_a_core_without_trackers_refuses_them_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "hooks", lambda method: ())
    own._options_for({"report_to": "none"}, None)
    with pytest.raises(UsageError, match="report_to is 'tensorboard', but no feature here has trackers"):
        own._options_for({"report_to": "tensorboard"}, None)
