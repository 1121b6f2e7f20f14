"""Forward and backward passes of a fitted Trainer, which a `StepRunner` of the recipe may replay.

The Trainer's own `training_step` computes the loss and the gradients of a micro-batch. A runner such as
`captured` records this call, and replays it without Python. Then the Trainer clips, updates and drops the
gradients as usual. So user code within `training_step` would run only while it is recorded. `code_in_passes`
lists such code, and the recipe is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from snugfit.features.loops.trainer.trainer_hooks import overrides
from snugfit.step.applier import step_runner
from snugfit.step.plain_loop import Built
from snugfit.step.step import Observer

if TYPE_CHECKING:
    import torch

    from snugfit.step.step_runner import StepRunner

METHODS = (
    "training_step", "compute_loss", "compute_loss_context_manager", "_prepare_inputs", "_prepare_input",
)  # fmt: skip
"""Methods of a Trainer that run within each pass."""

LIBRARIES = ("transformers.", "peft.", "accelerate.", "torch.", "snugfit.")
"""Modules whose hooks depend on tensors alone, so that their kernels can be replayed."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_WEIGHT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def code_in_passes(trainer: Any) -> Iterator[str]:
    """Yield the names of the user's code that `training_step` calls, and of settings that act within it."""
    for name in METHODS:
        if overrides(trainer, name):
            yield f"{name} of {type(trainer).__name__}"
    if trainer.compute_loss_func is not None:
        yield "compute_loss_func"
    if trainer.args.torch_empty_cache_steps is not None:
        yield "torch_empty_cache_steps"
    if trainer.args.world_size > 1:
        yield "the exchange of gradients between processes"
    for name, module in trainer.model.named_modules():
        if any(_is_users(hook) for kind in _HOOKS for hook in getattr(module, kind).values()):
            yield f"a hook of {name or 'the model'}"
    for name, weight in trainer.model.named_parameters():
        if any(getattr(weight, kind, None) for kind in _WEIGHT_HOOKS):
            yield f"a gradient hook of {name}"


def _is_users(hook: Any) -> bool:
    return not (getattr(hook, "__module__", None) or "").startswith(LIBRARIES)


class TrainerPasses:
    """The passes of one Trainer under one recipe."""

    updates_by_others = True

    def __init__(self, trainer: Any) -> None:
        plan = trainer.snugfit
        self.job, self.setup, self.device = plan.job, plan.recipe.setup(), trainer.args.device
        self._trainer = trainer
        self._call: tuple[Any, tuple[Any, ...], dict[str, Any]] = (None, (), {})
        self._runner: StepRunner | None = step_runner(self)  # type: ignore[arg-type]
        model = trainer.model
        self._built = Built(model, model, trainer.optimizer, None, iter(()), Observer())

    def run(
        self,
        model: Any,
        piece: Mapping[str, Any],
        share: float | torch.Tensor,
        *arguments: Any,
        **keywords: Any,
    ) -> torch.Tensor:
        """Return the loss of a micro-batch times `share`, after its gradients were added to the weights'.

        `model` and the remaining arguments are those of `training_step`.
        """
        self._call = model, arguments, keywords
        if self._runner is None:
            return self.run_passes(self._built, [piece], [share])
        weight: Any = None if isinstance(share, float) and share == 1 else share
        loss = self._runner.run_passes(self._built, [piece], [weight])
        if self._runner.why_not:
            self._trainer.snugfit.journal.warn_once(
                f"Steps run without CUDA graphs: {self._runner.why_not}. To record them, remove the cause."
            )
        assert loss is not None
        return loss

    def run_passes(
        self, built: Built, pieces: Sequence[Mapping[str, Any]], weights: Sequence[Any]
    ) -> torch.Tensor:
        """Run the Trainer's own passes of one micro-batch."""
        [piece], [weight] = pieces, weights
        model, arguments, keywords = self._call
        share = 1.0 if weight is None else weight
        loss: torch.Tensor = self._trainer.plain_pass(model, piece, share, *arguments, **keywords)
        return loss

    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """Return all parameters of the model, from the run's cached tree."""
        return list(self._trainer.snugfit_run.tree_of(self._trainer.model).parameters())

    def begin_replay(self) -> None:
        """Set the modes of training that `training_step` sets, as an evaluation may have changed them."""
        trainer = self._trainer
        trainer.snugfit_run.tree_of(trainer.model).train()
        if callable(train := getattr(trainer.optimizer, "train", None)):
            train()
