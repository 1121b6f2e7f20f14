"""`snugfit.fit`: a user's live `transformers.Trainer`, trained as planned.

    import snugfit

    trainer = snugfit.fit(trainer)                            # planned for the GPU here
    trainer = snugfit.fit(trainer, "bf16 + micro_batches(4)") # or the recipe is named
    trainer.train()

The same object comes back. What `TrainingArguments` have a word for is written there; the rest is done to the
model, or read by one subclass that the trainer's class becomes (`trainer_class.py`), under the user's own
subclass's name and above it. The global batch (`per_device_train_batch_size` times
`gradient_accumulation_steps`) is kept whatever the recipe is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from snugfit.doors.trainer_class import FittedTrainer, injected
from snugfit.doors.trainer_fitted import Fitted
from snugfit.doors.trainer_job import job_of
from snugfit.doors.trainer_setup import apply, refuse_what_cannot_be_fitted
from snugfit.techniques.recipe import Recipe

if TYPE_CHECKING:
    from snugfit.training.journal import Event


def say(event: Event) -> None:
    """What is told without a `watch` of one's own: warnings and changes of plan, one line each."""
    if text := event.get("text"):
        print(f"snugfit: {text}", flush=True)


def fit(
    trainer: Any,
    recipe: Recipe | str | None = None,
    *,
    watch: Callable[[Event], None] = say,
) -> Any:
    """Makes `trainer`, a `transformers.Trainer` or a subclass's, train under `recipe`; gives it back.

    `recipe` may be text. `watch` hears what is changed, corrected or kept.

    Raises `UsageError` for a trainer or a recipe that this cannot honour, by name; nothing is changed then.
    """
    refuse_what_cannot_be_fitted(trainer)
    job = job_of(trainer)
    recipe = Recipe.parse(recipe) if isinstance(recipe, str) else recipe or Recipe()
    fitted = Fitted(job=job, recipe=recipe, watch=watch)
    for line in apply(trainer, job, recipe):
        fitted.tell("changed", text=line)
    if not isinstance(trainer, FittedTrainer):
        trainer.__class__ = injected(type(trainer))
    trainer.snugfit = fitted
    return trainer
