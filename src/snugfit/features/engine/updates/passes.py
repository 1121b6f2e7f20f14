"""Forward and backward passes in which each gradient updates its weight as soon as it exists, and is freed.

torch calls a hook of each weight once its gradient is complete. For a weight that is used twice, such as tied
embeddings, both gradients are then summed. Clipping by the norm of all gradients needs that norm first. Both
passes then run twice: in `run_passes` for the norm, in `update` for the updates. In between, the random
generators are reset, so that dropout draws the same masks. If no norm is needed, `run_passes` updates the
weights.

With `released_late`, gradients are clipped by the norm of the step before, so one pass adds up the next norm
and updates the weights. The first step has no such norm and runs twice. The norm is an attribute of the
optimizer, so checkpoints have it.

Each pass may be replayed as a CUDA graph (`replay/step.py`). The graph of the backward pass contains the work
of the hooks, which reads the step's scalars on the device.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, final

from snugfit.errors import UsageError
from snugfit.features.engine.replay.graphs import NotRecorded
from snugfit.features.engine.replay.step import CapturedStep
from snugfit.features.engine.updates.hooked_pass import HookedPass
from snugfit.features.engine.updates.weight_updates import TorchUpdates, WeightUpdates
from snugfit.step.step_runner import StepRunner
from snugfit.training.rng import all_rng_states, restore_all_rng_states

if TYPE_CHECKING:
    import torch

    from snugfit.step.plain_loop import PlainStep


PREVIOUS = "previous_norm"
"""Name of an optimizer's attribute: the norm of the last step's gradients, for `released_late`."""


@final
class ReleasedPasses(StepRunner):
    """Runs the forward and backward passes of one loop's steps, with the weight updates in the
    backward pass.
    """

    def __init__(self, loop: PlainStep, recorded: StepRunner | None, *, clips_late: bool = False) -> None:
        # The loop refers to this object, so a weak reference back avoids a cycle.
        self._loop: PlainStep = weakref.proxy(loop)
        self._captured = recorded if isinstance(recorded, CapturedStep) else None
        self._updates: WeightUpdates | None = None
        self._hooks: list[Any] = []
        self._pass: HookedPass | None = None
        self._repeat: Callable[[], None] | None = None
        self._clips_late = clips_late
        self._previous: torch.Tensor | None = None  # read by recorded updates, so never replaced

    def updates_at_once(self, clips: bool) -> bool:
        """Return True if the next backward pass updates the weights, because no norm is needed or that of the
        last step is used.
        """
        return not clips or self._clips_late

    def run_passes(
        self, built: Any, pieces: Sequence[Mapping[str, Any]], weights: Sequence[float | None]
    ) -> torch.Tensor | None:
        """Run forward and backward of the step's only host micro-batch, and return its loss, or None if
        losses are not kept. Afterwards all weights are updated, or `norm` is set if the job clips.
        """
        if len(pieces) > 1:
            raise UsageError(
                "Gradients of micro-batches are sums, which 'released' does not keep. Try 'whole_batch'."
            )
        updates = self._updates or self._attach(built)
        self.norm, self.has_begun, self._repeat = None, False, None
        # Without clipping, a single pass computes and applies the gradients.
        if not self._loop.needs_norm():
            updates.begin_update(None, 0.0)
            return self._run_updating(HookedPass("once", self._update), built, pieces, weights)
        if self._clips_late and hasattr(built.optimizer, PREVIOUS):
            return self._run_late(built, pieces, weights)
        # Dropout must draw the same masks in both backward passes.
        draws, buffers = all_rng_states(self._loop.device), _versions(built.model)
        updates.begin_norm()
        norm_pass = HookedPass("norm", updates.take)
        total = self._run(norm_pass, built, pieces, weights)
        # A repeated pass would count the batch twice in buffers such as running statistics.
        _refuse_changed(buffers, _versions(built.model))
        built.observer.phase("clip")
        self.norm = updates.norm()
        self._keep_norm(built.optimizer)
        self._repeat = partial(self._run_again, draws, norm_pass.weights, built, pieces, weights)
        return total

    def _run_late(self, built: Any, *passes: Any) -> torch.Tensor | None:
        """Run a step whose gradients are clipped by the norm of the step before, and keep their own norm for
        the next step.
        """
        import torch

        updates, earlier = self._updates, getattr(built.optimizer, PREVIOUS)
        assert updates is not None
        if self._previous is None:
            self._previous = torch.empty_like(earlier, device=self._loop.device)
        self._previous.copy_(earlier)
        updates.begin_norm()
        updates.begin_update(self._previous, self._loop.job.clip or math.inf)
        total = self._run_updating(HookedPass("late", self._take_and_update), built, *passes)
        built.observer.phase("clip")
        self.norm = updates.norm()
        self._keep_norm(built.optimizer)
        return total

    def _keep_norm(self, optimizer: Any) -> None:
        """Store the norm of this step's gradients for the next step, if that clips by it."""
        if self._clips_late and self.norm is not None:
            setattr(optimizer, PREVIOUS, self.norm)

    def _take_and_update(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        assert self._updates is not None
        self._updates.take(weight, gradient)
        self._update(weight, gradient)

    def update(self, built: Any, norm: torch.Tensor | None = None) -> None:
        """Update the weights that `run_passes` has not updated, by running forward and backward once more."""
        repeat, self._repeat = self._repeat, None
        if repeat is not None:
            repeat()

    def close(self) -> None:
        """Remove the hooks of the model's weights after the last step."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._updates, self._repeat = [], None, None

    def _attach(self, built: Any) -> WeightUpdates:
        self._updates = updates_of(built.optimizer, built.model)
        weights = (weight for group in built.optimizer.param_groups for weight in group["params"])
        # If a weight is used twice, its hook runs once, after both gradients are summed.
        self._hooks = [
            weight.register_post_accumulate_grad_hook(self._update_on_gradient) for weight in weights
        ]
        return self._updates

    def _run(
        self,
        hooked: HookedPass,
        built: Any,
        pieces: Sequence[Mapping[str, Any]],
        weights: Sequence[float | None],
    ) -> torch.Tensor | None:
        assert self._updates is not None
        self._pass = hooked
        captured = self._captured
        try:
            if captured is None or not self._updates.can_be_recorded:
                return self._loop.run_passes(built, pieces, weights, again=hooked.again)
            # Recorded graphs read the addresses of optimizer states.
            if self._updates.has_moved():
                captured.drop_graphs()
            return captured.run_passes(built, pieces, weights, hooked)
        finally:
            self._pass = None
            self.why_not = "" if captured is None else captured.why_not

    def _run_updating(self, hooked: HookedPass, *passes: Any) -> torch.Tensor | None:
        assert self._updates is not None
        total = self._run(hooked, *passes)
        # Weights change from here on, so recovery from an error needs a checkpoint.
        self.has_begun = True
        self._updates.count(hooked.weights)
        return total

    def _run_again(self, draws: Mapping[str, Any], met: Iterable[torch.Tensor], *passes: Any) -> None:
        assert self._updates is not None
        restore_all_rng_states(draws, self._loop.device)
        clip = self._loop.job.clip
        # Optimizer states are created before the recording, in which they cannot be allocated.
        self._updates.make_states(met)
        self._updates.begin_update(self.norm if clip else None, clip or 0.0)
        self._run_updating(HookedPass("again", self._update, again=True), *passes)

    def _update_on_gradient(self, weight: torch.Tensor) -> None:
        """Use a weight's gradient, for the norm or an update, as soon as it exists, and free it. Raises
        `UsageError` for a second one in the same backward pass.
        """
        import torch

        gradient, hooked = weight.grad, self._pass
        if hooked is None or gradient is None:
            return
        # The gradient is freed here, before the next one exists.
        weight.grad = None
        if weight in hooked.weights:
            raise UsageError(
                "A weight got two gradients in one backward pass, which cannot be summed where each is "
                "dropped: reentrant checkpointing does that. Take 'all_gradients', or use_reentrant=False."
            )
        hooked.weights[weight] = None
        with torch.no_grad():
            hooked.take(weight, gradient)

    def _update(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        assert self._updates is not None
        assert self._pass is not None
        if not self._pass.is_recorded:
            self.has_begun = True
        elif not self._updates.has_states(weight):
            # During a recording, states cannot be created, because they would be allocated in the graphs'
            # memory.
            raise NotRecorded("a weight has its first gradient in a step that is recorded")
        self._updates.update(weight, gradient)


def _versions(model: Any) -> dict[str, tuple[int, int]]:
    """Return the `id` and version counter of each buffer of the model, by name, to detect changes."""
    return {name: (id(buffer), buffer._version) for name, buffer in model.named_buffers()}


def _refuse_changed(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> None:
    """Raise `UsageError` for a module buffer that a forward pass has changed: a second pass would change it
    again.
    """
    for name, (identity, version) in after.items():
        # If a tensor was replaced, its old value still exists, so it was not overwritten.
        if before.get(name, (identity, version)) != (identity, version) and before[name][0] == identity:
            raise UsageError(
                f"The forward pass writes the model's buffer {name}, as batch normalisation does its "
                "statistics. Clipping takes two passes a step with 'released', which would count them twice. "
                "Take 'all_gradients', or do not clip."
            )


def updates_of(optimizer: Any, model: Any) -> WeightUpdates:
    """Return an object that updates the model's trained weights one by one with this optimizer."""
    from snugfit.features.engine.masters.adamw import MasterAdamW

    if isinstance(optimizer, MasterAdamW):
        from snugfit.features.engine.masters.one_weight import MasterUpdates

        return MasterUpdates(optimizer)
    _resolve_overrides(optimizer)
    return TorchUpdates(optimizer, model.parameters())


def _resolve_overrides(optimizer: Any) -> None:
    """Store each override of an optimizer of bitsandbytes by its weight instead of the weight's position.

    bitsandbytes searches the overridden weights in its first step, and stores their positions in the
    parameter groups. In a group of one weight, position 0 would give each weight the override of another.
    """
    if not hasattr(optimizer, "check_overrides"):
        return
    optimizer.check_overrides()
    optimizer.mng.index2config.clear()
    # Otherwise the first step would repeat the search.
    optimizer.to_gpu()
    optimizer.initialized = True
