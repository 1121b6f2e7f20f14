"""The function `snugfit.fit`, which prepares a user's `transformers.Trainer` object for a recipe (its
techniques).

    import snugfit

    trainer = snugfit.fit(trainer)  # with a recipe that is planned for the GPU of this machine
    trainer.train()

A second argument names a recipe instead: `snugfit.fit(trainer, "bf16 + micro_batches(4)")`.

`fit` returns the same object. Settings with a counterpart in `TrainingArguments` are written there. The
others are applied to the model, or by a new subclass of the user's class (`trainer_class.py`). The trainer's
class becomes this subclass, which has the same name. The global batch (`per_device_train_batch_size` times
`gradient_accumulation_steps`) stays the same under any recipe.

Started by torchrun or `accelerate launch`, the same script trains in several processes. They use the
Trainer's own DDP (`ranks.py`) or its FSDP2, if configured (`sharded.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from snugfit.errors import escape_controls
from snugfit.features.loops.trainer.fit_run import FitPlan
from snugfit.features.loops.trainer.job import job_of, several_samples
from snugfit.features.loops.trainer.plan import choose, compared_job, take_recipe
from snugfit.features.loops.trainer.setup import (
    apply,
    refuse_optim_without_package,
    refuse_other_objects,
)
from snugfit.features.loops.trainer.trainer_class import FittedTrainer, fitted_class
from snugfit.job.batch_layout import BatchDims
from snugfit.job.gpu import capability_of
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity, Slot
from snugfit.training.journal import Event, Journal
from snugfit.training.recovery import cut_warning


def print_event(event: Event) -> None:
    """Print the warnings and changes of a recipe, one line for each. It is the default callback of `fit`."""
    if text := event.get("text"):
        with suppress(OSError):  # the terminal is closed, and the run continues until its checkpoint
            print(f"snugfit: {escape_controls(text)}", flush=True)


def fit(
    trainer: Any,
    recipe: Recipe | str | None = None,
    *,
    gpu: str | None = None,
    fidelity: Fidelity | str = Fidelity.SAME,
    batch_dims: BatchDims | None = None,
    compare_code: bool = True,
    watch: Callable[[Event], None] = print_event,
) -> Any:
    """Prepare `trainer`, a `transformers.Trainer` or a subclass's, to train under `recipe`, and return it.

    `recipe` may be text. The default is a plan: the fastest recipe that is as exact as the trainer's
    arguments and `fidelity` require. The plan is for the named `gpu`, or this machine's; without any GPU, the
    trainer keeps its settings. `batch_dims` names the dimension of the samples for tensors that do not start
    with it, as in `Model.from_module`. A run resumes only with unchanged code (collator, loss, forward
    passes), unless `compare_code` is False. `watch` is called with every event of the training log, and every
    change; events for the user have a `text`.

    Raises `UsageError` for an unsupported trainer or recipe, by name, and `NothingFits` if no recipe fits.
    Nothing has changed then.
    """
    if isinstance(recipe, str):
        recipe = Recipe.parse(recipe)  # a wrong recipe is refused before any data is read
    refuse_other_objects(trainer)
    if recipe is None:
        refuse_optim_without_package(trainer)
    given = None if recipe is None else take_recipe(trainer, recipe, gpu)
    job, capability = job_of(trainer, batch_dims), capability_of(trainer.args.device)
    chosen = given or choose(trainer, job, gpu, fidelity)
    chosen.recipe.check(job, capability)
    pieces, samples = chosen.recipe.pieces, None
    notes = chosen.recipe.lines_on_cpu() if trainer.args.device.type == "cpu" else ()
    changes = apply(trainer, job, chosen.recipe, chosen.user_slots)
    compared = job
    if pieces > 1:
        samples = several_samples(trainer, job)
        compared = compared_job(trainer, job, samples, pieces=pieces)
    # The layers of the user's own micro-batches mix samples in any Trainer, so that is no news.
    is_news = compared is not job or Slot.BATCHING not in chosen.user_slots
    warnings = [warning["text"] for warning in cut_warning(compared, chosen.recipe)] if is_news else []
    journal = Journal(None, watch) if trainer.args.process_index == 0 else Journal(None)
    planned = [chosen.note] if chosen.note else []
    for event, lines in (("planned", planned), ("changed", changes), ("note", notes), ("warning", warnings)):
        for line in lines:
            journal.tell(event, text=line)
    if not isinstance(trainer, FittedTrainer):
        # The object stays the same, because the user's script and callbacks refer to it.
        trainer.__class__ = fitted_class(type(trainer))
    trainer.snugfit = FitPlan(
        job=compared,
        recipe=chosen.recipe,
        user_slots=chosen.user_slots,
        journal=journal,
        compare_code=compare_code,
        samples=samples,
    )
    trainer.snugfit_run = None
    return trainer
