"""The passes of a step whose gradients do not stay: each updates its weight as soon as it is there.

torch calls a hook of each weight when its gradient is whole, which for one that a model uses twice, as tied
embeddings, is after both. What is clipped by the norm of all gradients needs that norm first. Then the passes
run twice: `run_passes` takes the norm, `update` runs them again and updates. Where no norm is needed
`run_passes` updates. Between the two random generators are set back, so that dropout draws the same masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, final

from snugfit.errors import UsageError
from snugfit.step.wishes.updates.draws import Draws
from snugfit.step.wishes.updates.one_weight import WeightUpdates, updates_of

if TYPE_CHECKING:
    import torch

    from snugfit.job.job import Job

Heard = Callable[["torch.Tensor", "torch.Tensor"], None]
"""Is told of a weight, and of its gradient."""


class ReleasedLoop(Protocol):
    """The loop whose passes these are (`plain_loop.PlainStep`)."""

    job: Job
    device: torch.device

    def needs_norm(self) -> bool:
        """Whether the norm of the gradients must be known before the first update of the next step."""

    def run_passes(
        self,
        built: Any,
        pieces: Sequence[Mapping[str, Any]],
        weights: Sequence[float | None],
        *,
        again: bool = False,
    ) -> torch.Tensor | None:
        """The passes as they are written, for the first time or `again`."""


@final
class ReleasedPasses:
    """The passes of one loop's steps, and the updates within them."""

    def __init__(self, loop: ReleasedLoop) -> None:
        self._loop = loop
        self._updates: WeightUpdates | None = None
        self._hooks: list[Any] = []
        self._heard: Heard | None = None
        self._met: set[torch.Tensor] = set()
        self._repeat: Callable[[], None] | None = None
        self.norm: torch.Tensor | None = None
        """Of the last step's gradients, a scalar on the device; None where it was not needed."""
        self.has_begun = False
        """Whether the last step that was begun has updated a weight."""

    def run_passes(
        self, built: Any, pieces: Sequence[Mapping[str, Any]], weights: Sequence[float | None]
    ) -> torch.Tensor | None:
        """The passes of these host micro-batches, of which there is one, and what their loss comes to where
        losses are kept. Afterwards `norm` is known, or everything is updated."""
        if len(pieces) > 1:
            raise UsageError("Gradients of micro-batches are sums, which 'released' does not keep.")
        updates = self._updates or self._attach(built)
        self.norm, self.has_begun, self._repeat = None, False, None
        if not self._loop.needs_norm():
            updates.begin_update(None, 0.0)
            return self._run(self._update, built, pieces, weights)
        draws, buffers = Draws(self._loop.device), _versions(built.model)
        updates.begin_norm()
        total = self._run(updates.take, built, pieces, weights)
        _refuse_changed(buffers, _versions(built.model))
        built.observer.phase("clip")
        self.norm = updates.norm()
        self._repeat = partial(self._run_again, draws, built, pieces, weights)
        return total

    def update(self) -> None:
        """Updates what `run_passes` has left, by its passes once more."""
        repeat, self._repeat = self._repeat, None
        if repeat is not None:
            repeat()

    def detach(self) -> None:
        """No step follows: the model's weights have no hooks any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._updates, self._repeat = [], None, None

    def _attach(self, built: Any) -> WeightUpdates:
        self._updates = updates_of(built.optimizer, built.model)
        weights = (weight for group in built.optimizer.param_groups for weight in group["params"])
        self._hooks = [weight.register_post_accumulate_grad_hook(self._hear) for weight in weights]
        return self._updates

    def _run(self, heard: Heard, *passes: Any, again: bool = False) -> torch.Tensor | None:
        self._heard = heard
        self._met.clear()
        try:
            return self._loop.run_passes(*passes, again=again)
        finally:
            self._heard = None

    def _run_again(self, draws: Draws, *passes: Any) -> None:
        assert self._updates is not None
        draws.set_back()
        clip = self._loop.job.clip
        self._updates.begin_update(self.norm if clip else None, clip or 0.0)
        self._run(self._update, *passes, again=True)

    def _hear(self, weight: torch.Tensor) -> None:
        """A weight's gradient is there. Raises `UsageError` for a second one in the same pass."""
        import torch

        gradient = weight.grad
        if self._heard is None or gradient is None:
            return
        weight.grad = None
        if weight in self._met:
            raise UsageError(
                "A weight got two gradients in one backward pass, which cannot be summed where each is "
                "dropped: reentrant checkpointing does that. Take 'all_gradients', or use_reentrant=False."
            )
        self._met.add(weight)
        with torch.no_grad():
            self._heard(weight, gradient)

    def _update(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        assert self._updates is not None
        self.has_begun = True
        self._updates.update(weight, gradient)


def _versions(model: Any) -> dict[str, tuple[int, int]]:
    """Of each buffer by name which tensor it is, and how often it was written."""
    return {name: (id(buffer), buffer._version) for name, buffer in model.named_buffers()}


def _refuse_changed(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> None:
    """Raises `UsageError` where a buffer was written: a second pass would write it again."""
    for name, (identity, version) in after.items():
        if before.get(name, (identity, version)) != (identity, version) and before[name][0] == identity:
            raise UsageError(
                f"The forward pass writes the model's buffer {name}, as batch normalisation does its "
                "statistics. Clipping takes two passes a step with 'released', which would count them twice. "
                "Take 'all_gradients', or do not clip."
            )
