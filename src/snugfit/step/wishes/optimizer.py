"""Handler of the Setup's optimizer, which is created after all changes of modules."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from snugfit.step.wishes.handler import Context, Handler, ScriptContext
from snugfit.step.wishes.python_text import call_text
from snugfit.techniques.feature import InstallStage
from snugfit.techniques.technique import Slot

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job
    from snugfit.techniques.setup import OptimizerWish


class OptimizerHandler(Handler):
    """Handler of the optimizer. Loops with parameter groups and hyperparameters of their own call
    `make_optimizer`.
    """

    wish, slot, stage = "optimizer", Slot.OPTIMIZER, InstallStage.OPTIMIZE
    read_by_loops = True

    def around_rehearsal(self, value: OptimizerWish, *, on_gpu: bool) -> Context | None:
        """Return torch's autocast context for the device; None without autocast."""
        return partial(value.shapes.run, on_gpu=on_gpu) if value.shapes else None

    def training_arguments(self, value: OptimizerWish, job: Job, device: torch.device) -> dict[str, Any]:
        """Return `optim`, the optimizer's name in the Trainer, if it has one."""
        return {"optim": value.trainer_name} if value.trainer_name else {}

    def script(self, value: OptimizerWish, context: ScriptContext) -> dict[str, Any]:
        """Return the optimizer's constructor call as text, after lines that prepare the model for it."""
        fields: dict[str, Any] = {"decay_groups": context.job.decay_groups and value.weight_decay}
        fields["optimizer"] = call_text(value.factory, "parameters, lr=LEARNING_RATE")
        if fields["optimizer"] is None:
            raise context.refusal(self.slot, "its optimizer is snugfit's own code")
        if value.prepare is not None and not context.trainer:
            text = call_text(value.prepare, "model")
            lines = (text.imported, "", f"model = {text.called} or model") if text else None
            fields["preparing"] = lines or context.recipe[self.slot].code(context.job)
        return fields


def make_optimizer(wish: OptimizerWish, model: Any, groups: Any, **numbers: Any) -> torch.optim.Optimizer:
    """Return the optimizer over these parameters or groups; the recipe's arguments override the
    hyperparameters `numbers`. A given model is prepared for the optimizer.
    """
    if wish.prepare and model is not None:
        wish.prepare.run(model)
    optimizer: torch.optim.Optimizer = wish.factory.run(groups, **numbers)
    return optimizer


def known_numbers(wish: OptimizerWish, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's hyperparameters, such as `lr`, that the constructor takes and the recipe does not
    set.

    Only hyperparameters with the same meaning in every optimizer are included. `eps` is included only with
    two `betas` (Adafactor has two `eps`, AdEMAMix three `betas`).
    """
    accepted = inspect.signature(wish.factory.resolve()).parameters.keys() - wish.factory.arguments.keys()
    is_of_adam = "betas" in accepted and len(numbers.get("betas", ())) == 2
    common = {"lr", "weight_decay", "maximize", *(("betas", "eps") if is_of_adam else ())}
    return {name: value for name, value in numbers.items() if name in common & accepted}
