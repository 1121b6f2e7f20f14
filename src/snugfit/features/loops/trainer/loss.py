"""The weight of a micro-batch's loss: its fraction of the labels over which the whole batch's loss is
averaged.

A model that accepts `num_items_in_batch` should divide its loss by the whole batch's items, as transformers
assumes. But any model with `**kwargs` accepts it, and many still average over their micro-batch. transformers
then sums means instead of averaging them: n micro-batches give n times the gradient. For a model that does
not accept it, all micro-batches have the same weight, whatever their count of items.

- Without a custom loss, the model computes its own mean, which is multiplied by the weight.
- With `compute_loss` or `compute_loss_func`, the user's code gets `num_items_in_batch` as a tensor that
  records its use. A loss that used it counts as normalized by it; any other is a mean and is multiplied by
  the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from snugfit.features.loops.trainer.live_trainer import trainer_shifts_labels
from snugfit.features.loops.trainer.ranks import shares_of_all
from snugfit.features.loops.trainer.trainer_hooks import overrides
from snugfit.training.rng import preserve_rng
from snugfit.training.run.items import items_in, items_in_each, shifts_labels

if TYPE_CHECKING:
    import torch

    from snugfit.features.loops.trainer.step_timer import StepState
    from snugfit.training.ranks import Ranks


@dataclass(kw_only=True)
class LossTraits:
    """Properties of a model's loss, such as its use of `num_items_in_batch`. Each is None or False before the
    first test.
    """

    uses_item_count: bool | None = None
    """True if the loss depends on the argument `num_items_in_batch`; None until it is computed."""

    shifts_labels: bool | None = None
    """True if the model compares logits with the label of the next token; None until it is computed."""

    corrected: bool = False
    """True after the warning that snugfit corrects an error of transformers in this loss."""


def share_of(trainer: Any, step: StepState, piece: Mapping[str, Any], index: int) -> float | torch.Tensor:
    """Return the weight of the loss of `piece`, a part of the step's micro-batch number `index`.

    A single undivided micro-batch has weight 1. Counting its labels would wait for the GPU's previous step.
    """
    if step.shares is not None:
        return step.shares[index]
    whole = piece is step.batches[index]
    if whole and len(step.batches) == 1:
        return 1.0
    counting = _counting(trainer)
    if not step.item_counts:
        step.item_counts = items_in_each(step.batches, **counting)
    items: int = step.item_counts[index] if whole else items_in(piece, **counting)
    return items / sum(step.item_counts) if items else 0.0


def _counting(trainer: Any) -> dict[str, Any]:
    """Return the keyword arguments with which `items_in` counts the labels in this trainer's batches."""
    traits: LossTraits = trainer.snugfit.loss
    if traits.shifts_labels is None:
        model = trainer.accelerator.unwrap_model(trainer.model)
        traits.shifts_labels = trainer_shifts_labels(trainer) or shifts_labels(model)
    return {"shifts": traits.shifts_labels, "dims": trainer.snugfit.job.model.batch_dims}


def weigh_among_all(trainer: Any, step: StepState, ranks: Ranks) -> None:
    """At the start of a step, set the weight of each micro-batch's loss relative to those of all
    processes.
    """
    if ranks.are_many:
        step.shares = shares_of_all(step.batches, trainer.args.device, ranks, **_counting(trainer))


def has_user_loss(trainer: Any) -> bool:
    """Return True if the user's own code computes the loss: a function, or a method of a Trainer subclass."""
    return trainer.compute_loss_func is not None or overrides(trainer, "compute_loss")


def weighed_loss(
    trainer: Any, items_of: Callable[[Mapping[str, Any]], float], model: Any, piece: Any, whole: Any
) -> Any:
    """Return the weighted loss of a part of a batch, computed outside of a training step.

    Return None for a piece without counted items. A loss that uses the whole batch's number of items is
    returned unweighted.
    """
    import torch

    counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    is_given = counts and has_user_loss(trainer) and "labels" in whole
    items, of_whole = items_of(piece), items_of(whole)
    if not items:
        return None
    given = None
    if is_given:
        given = track_use(torch.tensor(of_whole, device=trainer.args.device))
    loss = trainer.compute_loss(model, piece, num_items_in_batch=given)
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    used = bool(given.used) if given is not None and scaled is None else bool(scaled)
    return loss if used else loss * (items / of_whole)


@cache
def _tracked_tensor() -> type[Any]:
    import torch

    class TrackedTensor(torch.Tensor):
        """A scalar tensor that records if a computation used it. The results are plain tensors."""

        used: list[bool]

        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None
        ) -> Any:
            for value in (*arguments, *(keywords or {}).values()):
                if isinstance(value, cls):
                    value.used.append(True)
            # Otherwise further computation with the result would be recorded as uses.
            with torch._C.DisableTorchFunctionSubclass():
                return function(*arguments, **(keywords or {}))

    return TrackedTensor


def track_use(items: torch.Tensor) -> Any:
    """Return a copy of a scalar tensor that records its use. Its list `used` is empty until a computation
    uses it.
    """
    tracked = items.detach().as_subclass(_tracked_tensor())
    tracked.used = []
    return tracked


def depends_on_item_count(trainer: Any, model: Any, inputs: Mapping[str, Any], items: Any) -> bool:
    """Return True if this model's loss depends on `num_items_in_batch`.

    One forward pass without gradients tests it; random generators and buffers are restored.
    """
    import torch

    tracked = track_use(torch.as_tensor(items))
    # A forward pass may change buffers, such as running statistics.
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    with preserve_rng(trainer.args.device), torch.no_grad():
        model(**inputs, num_items_in_batch=tracked)
        for name, value in model.named_buffers():
            if name in buffers:
                value.copy_(buffers[name])
    return bool(tracked.used)


def problem_of_model_loss(
    trainer: Any, step: StepState, model: Any, inputs: Mapping[str, Any], items: Any
) -> str:
    """Return a sentence on the error that transformers makes with this model's loss; empty without an error.
    The weights of micro-batches correct this error.

    The model is tested once. Weights cannot correct a loss that is no mean over the counted items.
    """
    traits, job = trainer.snugfit.loss, trainer.snugfit.job
    if trainer.label_smoother is not None or job.mixes_samples or job.unclear_cut:
        return ""  # the loss divides by num_items_in_batch itself, or another warning covers it
    per_micro_batch = not trainer.model_accepts_loss_kwargs or items is None
    if not per_micro_batch and traits.uses_item_count is None:
        traits.uses_item_count = depends_on_item_count(trainer, model, inputs, items)
    if _counts_evenly(step) if per_micro_batch else traits.uses_item_count:
        return ""
    name = type(trainer.accelerator.unwrap_model(model)).__name__
    if per_micro_batch:
        return _EQUAL_COUNTS.format(name=name, which="")
    return _SUMMED.format(who=name, n=len(step.batches), which="")


def problem_of_users_loss(trainer: Any, step: StepState, items: Any) -> str:
    """Return a sentence that transformers scales the user's own loss wrongly over several micro-batches; ""
    if it does not.

    The loss did not use `num_items_in_batch`.
    """
    if trainer.snugfit.job.mixes_samples or trainer.snugfit.job.unclear_cut:
        return ""
    function_name = "compute_loss_func" if trainer.compute_loss_func is not None else "compute_loss"
    assumed = trainer.compute_loss_func is not None or (
        trainer.model_accepts_loss_kwargs and items is not None
    )
    if assumed and getattr(trainer, "loss_is_scaled_for_ga", None) is None:
        return _SUMMED.format(who=function_name, n=len(step.batches), which=_OF_MEANS)
    return "" if _counts_evenly(step) else _EQUAL_COUNTS.format(name=function_name, which=_OF_MEANS)


def _counts_evenly(step: StepState) -> bool:
    return abs(float(step.share or 0) * len(step.batches) - 1) < 1e-9


_SUMMED = (
    "{who} averages over each micro-batch and ignores num_items_in_batch. transformers would sum the means "
    "of {n} micro-batches, so the gradient would be {n} times too large. Here each micro-batch counts by "
    "its share of the batch{which}."
)
_EQUAL_COUNTS = (
    "Micro-batches have different numbers of items, but transformers would give the losses of {name} the "
    "same weight. Here each micro-batch counts by its share of the batch{which}."
)
_OF_MEANS = ", which is right for a mean over samples or labels, and not for one with weights"
