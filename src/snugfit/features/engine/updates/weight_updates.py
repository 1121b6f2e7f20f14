"""Updates of one weight at a time: by torch's optimizers here, by ours in `masters/one_weight.py`.

The usual optimizer and its own `step` update a single weight: its parameter groups are temporarily one group
with that weight. The optimizer states and checkpoints are therefore the usual ones.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch


class WeightUpdates(ABC):
    """Base class to update one weight at a time with an optimizer, and to compute the gradient norm."""

    can_be_recorded: ClassVar = False
    """True if `take` and `update` compute nothing on the host, so that a CUDA graph can contain them."""

    def __init__(self, optimizer: Any, order: Iterable[torch.Tensor]) -> None:
        """Store the optimizer, and the `order` of the weights in which their norms are summed."""
        self._optimizer = optimizer
        self._groups = {
            weight: number
            for number, group in enumerate(optimizer.param_groups)
            for weight in group["params"]
        }
        self._order = {weight: number for number, weight in enumerate(order)}
        self._norms: dict[int, torch.Tensor] = {}
        self._coefficient: torch.Tensor | None = None

    def has_moved(self) -> bool:
        """Return True if optimizer states have moved since the last call, which makes CUDA graphs invalid."""
        return False

    def begin_norm(self) -> None:
        """Set the sum for the gradient norm to zero."""
        self._norms.clear()

    @abstractmethod
    def take(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add this gradient to the sum for the gradient norm."""

    def norm(self) -> torch.Tensor:
        """Return the norm of all added gradients: a scalar on their device."""
        import torch

        # The norms are sorted, so that their sum does not depend on the order in which gradients appear.
        norms = [norm for _, norm in sorted(self._norms.items())]
        self._norms.clear()
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        return norm

    def begin_update(self, norm: torch.Tensor | None, max_norm: float) -> None:
        """Prepare an optimizer step that updates weights one by one. With a gradient `norm`, gradients are
        clipped to the norm `max_norm`.
        """
        from snugfit.features.engine.masters.adamw import clip_coefficient

        self._coefficient = None if norm is None else clip_coefficient(norm, max_norm)

    @abstractmethod
    def has_states(self, weight: torch.Tensor) -> bool:
        """Return True if this weight has optimizer states, so that its update creates none."""

    def make_states(self, weights: Iterable[torch.Tensor]) -> None:  # noqa: B027 - torch's step creates them
        """Create the optimizer states of these weights before their first updates, if the optimizer permits
        it.
        """

    @abstractmethod
    def update(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """Update one weight by its gradient, with the optimizer."""

    def count(self, weights: Iterable[torch.Tensor]) -> None:  # noqa: B027 - torch's step counts itself
        """Increment the optimizer's step counts of these weights, if an update does not."""


class TorchUpdates(WeightUpdates):
    """Updates by a torch optimizer, one weight at a time; the update of a weight must not depend on others.

    Its learning rates are Python numbers on the host, which a CUDA graph cannot read.
    """

    def take(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add this gradient's norm, in 32 bits or more, to the sum (`torch.nn.utils.get_total_norm`)."""
        import torch

        # The norm of 16-bit gradients is computed in 32 bits, as in `torch.nn.utils.get_total_norm`.
        wide = () if gradient.dtype in (torch.float32, torch.float64) else (2.0, torch.float32)
        (self._norms[self._order[weight]],) = torch._foreach_norm([gradient], *wide)

    def has_states(self, weight: torch.Tensor) -> bool:
        """Return True if the optimizer has states for this weight."""
        return bool(self._optimizer.state.get(weight))

    def update(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """Update one weight by its gradient with torch's optimizer; clipping scales the gradient in place."""
        if self._coefficient is not None:
            gradient.mul_(self._coefficient)
        weight.grad = gradient
        try:
            with self._only(weight):
                self._optimizer.step()
        finally:
            # Freeing the gradient here is the purpose of this class.
            weight.grad = None

    @contextlib.contextmanager
    def _only(self, weight: torch.Tensor) -> Iterator[None]:
        """Context in which the optimizer has a single parameter group with this weight alone."""
        groups = self._optimizer.param_groups
        # The optimizer sees a group of one weight with the group's settings, so all other weights are
        # unchanged.
        self._optimizer.param_groups = [{**groups[self._groups[weight]], "params": [weight]}]
        try:
            yield
        finally:
            self._optimizer.param_groups = groups
