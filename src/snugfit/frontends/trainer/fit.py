"""`snugfit.fit`: a user's live `transformers.Trainer`, trained as planned.

    import snugfit

    trainer = snugfit.fit(trainer)                            # planned for the GPU here
    trainer = snugfit.fit(trainer, "bf16 + micro_batches(4)") # or the recipe is named
    trainer.train()

The same object comes back. What `TrainingArguments` have a word for is written there; the rest is done to the
model, or read by one subclass that the trainer's class becomes (`trainer_class.py`), under the user's own
subclass's name and above it. The global batch (`per_device_train_batch_size` times
`gradient_accumulation_steps`) is kept whatever the recipe is.

Started by torchrun or `accelerate launch` the same script trains in several processes, by the Trainer's own
DDP (`ranks.py`) or, where it is told so, FSDP2 (`sharded.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from snugfit.errors import escape_controls
from snugfit.frontends.trainer.fit_plan import FitPlan
from snugfit.frontends.trainer.job import job_of, several_samples
from snugfit.frontends.trainer.plan import choose, compared_job
from snugfit.frontends.trainer.setup import (
    apply,
    refuse_optim_without_package,
    refuse_what_cannot_be_fitted,
)
from snugfit.frontends.trainer.trainer_class import FittedTrainer, fitted_class
from snugfit.job.batch_layout import BatchDims
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity, Slot
from snugfit.training.journal import Event, Journal
from snugfit.training.recovery import cut_warning


def say(event: Event) -> None:
    """Prints warnings and changes of plan, a line each, where the user gives no `watch`."""
    if text := event.get("text"):
        with suppress(OSError):  # a terminal that was closed: the run goes on to its checkpoint
            print(f"snugfit: {escape_controls(text)}", flush=True)


def fit(
    trainer: Any,
    recipe: Recipe | str | None = None,
    *,
    gpu: str | None = None,
    fidelity: Fidelity | str = Fidelity.SAME,
    batch_dims: BatchDims | None = None,
    compare_code: bool = True,
    watch: Callable[[Event], None] = say,
) -> Any:
    """Makes `trainer`, a `transformers.Trainer` or a subclass's, train under `recipe`; gives it back.

    `recipe` may be text. Without one it is planned, no less exact than the trainer's own arguments and
    `fidelity`: for the `gpu` of this name, or the one here; where there is neither, the trainer keeps what it
    asks for. `batch_dims` names the dimension of the samples where the tensors of a batch do not all begin
    with it, as `Model.from_module` does. A run is resumed with the code that it began with (collator, loss,
    forward passes), unless `compare_code` is False. `watch` hears every event of the journal, and what is
    changed; those that are to be read have a `text`.

    Raises `UsageError` for a trainer or a recipe that this cannot honour, by name, and `NothingFits`; nothing
    is changed then.
    """
    refuse_what_cannot_be_fitted(trainer)
    if recipe is None:
        refuse_optim_without_package(trainer)
    job = job_of(trainer, batch_dims)
    chosen = choose(trainer, job, recipe, gpu, fidelity)
    journal = Journal(None, watch) if trainer.args.process_index == 0 else Journal(None)
    if chosen.says:
        journal.tell("planned", text=chosen.says)
    for line in apply(trainer, job, chosen.recipe, chosen.user_slots):
        journal.tell("changed", text=line)
    if trainer.args.device.type == "cpu":
        for line in chosen.recipe.lines_on_cpu():
            journal.tell("note", text=line)
    pieces, samples = chosen.recipe.setup().micro_batches, None
    if pieces > 1:
        samples = several_samples(trainer, job)
        before, job = job, compared_job(trainer, job, samples, pieces=pieces)
        is_own = Slot.BATCHING in chosen.user_slots  # then layers that mix samples do so with any Trainer
        for warning in cut_warning(job, chosen.recipe) if job is not before or not is_own else ():
            journal.tell("warning", text=warning["text"])
    if not isinstance(trainer, FittedTrainer):
        trainer.__class__ = fitted_class(type(trainer))
    trainer.snugfit = FitPlan(
        job=job,
        recipe=chosen.recipe,
        user_slots=chosen.user_slots,
        journal=journal,
        compare_code=compare_code,
        samples=samples,
    )
    trainer.snugfit_run = None
    return trainer
