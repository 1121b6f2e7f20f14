"""Norm of the gradients, and gradient clipping."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from snugfit.techniques.registry import hooks

if TYPE_CHECKING:
    import torch


class TensorParts:
    """Operations on weights and gradients, for a process without shards. A feature has a subclass for sharded
    ones.
    """

    def is_part(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor is a shard, of which other processes have the rest."""
        return False

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this process's shard of a tensor; an unsharded tensor itself."""
        return tensor

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor, in each of the processes that have parts of it."""
        return tensor

    def groups(self, tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return the tensors in groups that can be passed together to torch's operators on lists
        (`torch._foreach_norm`).
        """
        return [list(tensors)]

    def total_norm(self, tensors: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
        """Return the norm of all tensors as if they were one vector, a scalar tensor. It is sharded if all
        tensors are sharded alike.
        """
        import torch

        return torch.nn.utils.get_total_norm(tensors, norm_type)


@functools.cache
def tensor_parts() -> TensorParts:
    """Return the operations on sharded tensors of the feature that shards them, or else those on whole
    tensors.
    """
    parts: TensorParts = next((make() for make in hooks("tensor_parts")), TensorParts())
    return parts


def gradient_norm(optimizer: Any, weights: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the norm of these weights' gradients as one vector, a scalar on their device. An optimizer that
    clips within its update computes the norm of all its weights, in 32 bits.
    """
    if getattr(optimizer, "clips_inside", False):
        norm: torch.Tensor = optimizer.gradient_norm()
        return norm
    return tensor_parts().total_norm([weight.grad for weight in weights if weight.grad is not None])


def clip(weights: Iterable[torch.Tensor], max_norm: float, optimizer: Any = None) -> None:
    """Scale all gradients down if their norm exceeds `max_norm` (`torch.nn.utils.clip_grad_norm_`). An
    optimizer that clips within its update scales them there.
    """
    import torch

    weights = [weight for weight in weights if weight.grad is not None]
    if not getattr(optimizer, "clips_inside", False) and len(tensor_parts().groups(weights)) == 1:
        torch.nn.utils.clip_grad_norm_(weights, max_norm)
    else:
        scale(weights, max_norm, gradient_norm(optimizer, weights), optimizer)


def scale(
    weights: Iterable[torch.Tensor], max_norm: float, norm: torch.Tensor, optimizer: Any = None
) -> None:
    """Clip gradients to the norm `max_norm`, given their current `norm`. An optimizer that clips within its
    update only receives the two numbers. Its `step` must be called next.
    """
    import torch

    if getattr(optimizer, "clips_inside", False):
        optimizer.clip_by(norm, max_norm)
        return
    for part in tensor_parts().groups(weights):
        torch.nn.utils.clip_grads_with_norm_(part, max_norm, norm)
