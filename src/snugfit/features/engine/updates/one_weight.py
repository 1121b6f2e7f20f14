"""Updates of one weight at a time: by torch's optimizers here, by ours in `masters/one_weight.py`.

The optimizer is the one of a step over all weights, with all its states, and its own `step` updates the
weight. For that its groups are temporarily one group with one weight. Its states, and so its checkpoints, are
the usual ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch


class WeightUpdates(Protocol):
    """Base class to update one weight at a time with an optimizer, and to compute the gradient norm."""

    can_be_recorded: ClassVar[bool]
    """True if `take` and `update` compute nothing on the host, so that a CUDA graph can contain them."""

    def has_moved(self) -> bool:
        """Return True if optimizer states have moved since the last call, which makes CUDA graphs invalid."""

    def begin_norm(self) -> None:
        """Set the sum for the gradient norm to zero."""

    def take(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add this gradient to the sum for the gradient norm."""

    def norm(self) -> torch.Tensor:
        """Return the norm of all added gradients: a scalar on their device."""

    def begin_update(self, norm: torch.Tensor | None, most: float) -> None:
        """Prepare an optimizer step that updates weights one by one. With a gradient `norm`, gradients are
        clipped to the norm `most`.
        """

    def has_states(self, weight: torch.Tensor) -> bool:
        """Return True if this weight has optimizer states, so that its update creates none."""

    def make_states(self, weights: Iterable[torch.Tensor]) -> None:
        """Create the optimizer states of these weights before their first updates, if the optimizer permits
        it.
        """

    def update(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """Update one weight by its gradient, with the optimizer."""

    def count(self, weights: Iterable[torch.Tensor]) -> None:
        """Increment the optimizer's step counts of these weights."""


class TorchUpdates:
    """Updates by a torch optimizer, one weight at a time; the update of a weight must not depend on
    others."""

    can_be_recorded: ClassVar = False
    """False: its learning rates are on the host, so that no CUDA graph can contain updates."""

    def __init__(self, optimizer: Any, model: Any) -> None:
        self._optimizer = optimizer
        self._groups = {
            weight: number
            for number, group in enumerate(optimizer.param_groups)
            for weight in group["params"]
        }
        self._order = {weight: number for number, weight in enumerate(model.parameters())}
        self._norms: dict[int, torch.Tensor] = {}
        self._coefficient: torch.Tensor | None = None

    def has_moved(self) -> bool:
        """Return False, since no part of torch's update is recorded as a CUDA graph."""
        return False

    def begin_norm(self) -> None:
        """Set the sum for the gradient norm to zero."""
        self._norms.clear()

    def take(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add this gradient's norm, in 32 bits or more, to the sum (`torch.nn.utils.get_total_norm`)."""
        import torch

        # 16-bit gradients get a norm in 32 bits, as in `torch.nn.utils.get_total_norm`.
        wide = () if gradient.dtype in (torch.float32, torch.float64) else (2.0, torch.float32)
        (self._norms[self._order[weight]],) = torch._foreach_norm([gradient], *wide)

    def norm(self) -> torch.Tensor:
        """Return the norm of all added gradients, in the model's order: a scalar on their device."""
        import torch

        # Sorted, so that the sum does not depend on the order in which gradients come.
        norms = [norm for _, norm in sorted(self._norms.items())]
        self._norms.clear()
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        return norm

    def begin_update(self, norm: torch.Tensor | None, most: float) -> None:
        """Prepare an optimizer step that updates weights one by one. With a gradient `norm`, gradients are
        clipped to the norm `most`.
        """
        from snugfit.features.engine.masters.adamw import clip_coefficient

        self._coefficient = None if norm is None else clip_coefficient(norm, most)

    def has_states(self, weight: torch.Tensor) -> bool:
        """Return True if the optimizer has states for this weight."""
        return bool(self._optimizer.state.get(weight))

    def make_states(self, weights: Iterable[torch.Tensor]) -> None:
        """Do nothing: the optimizer's own step creates the states."""

    def count(self, weights: Iterable[torch.Tensor]) -> None:
        """Do nothing: the optimizer's own step increments the step counts."""

    def update(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """Update one weight by its gradient with torch's optimizer; clipping scales the gradient in place."""
        if self._coefficient is not None:
            gradient.mul_(self._coefficient)
        weight.grad = gradient
        try:
            with self._only(weight):
                self._optimizer.step()
        finally:
            # The gradient is dropped at once, which is the purpose.
            weight.grad = None

    @contextlib.contextmanager
    def _only(self, weight: torch.Tensor) -> Iterator[None]:
        """Context in which the optimizer has a single parameter group with this weight alone."""
        groups = self._optimizer.param_groups
        # The group's settings stay, and its other weights are untouched.
        self._optimizer.param_groups = [{**groups[self._groups[weight]], "params": [weight]}]
        try:
            yield
        finally:
            self._optimizer.param_groups = groups


def updates_of(optimizer: Any, model: Any) -> WeightUpdates:
    """Return an object that updates the model's trained weights one by one with this optimizer."""
    from snugfit.features.engine.masters.adamw import MasterAdamW

    if isinstance(optimizer, MasterAdamW):
        from snugfit.features.engine.masters.one_weight import MasterUpdates

        return MasterUpdates(optimizer)
    return TorchUpdates(optimizer, model)
