"""Weights and gradients that are parts of others (`DTensor`), some over other ranks than the rest, or whole.

Under tensor parallelism matrices are sharded over some ranks, and norms are whole in each. With FSDP2
matrices are sharded along two axes of the mesh and norms along one. torch's operators on lists of tensors
take those of one mesh alone. So an optimizer has a group for each mesh, as in transformers' Trainer. The norm
of all gradients is that of the norms of each. If all are alike, torch's functions are called as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from snugfit.hub_kernels import quiet

if TYPE_CHECKING:
    import torch

Groups = list[list["torch.Tensor"]]


def split(tensors: Iterable[torch.Tensor], key: Callable[[Any], Any]) -> Groups:
    """Group the tensors by a key, in the order of the first of each."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(key(tensor), []).append(tensor)
    return list(groups.values())


def mesh(tensor: Any) -> Any:
    """Return the mesh of ranks that a tensor is sharded over; None for a whole one."""
    return getattr(tensor, "device_mesh", None)


def spread(tensor: Any) -> Any:
    """Return the mesh and the placements of a `DTensor`; None for a whole tensor."""
    return mesh(tensor), getattr(tensor, "placements", None)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor of a `DTensor`, gathered in each process."""
    gathered: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


def total_norm(tensors: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all tensors as one vector, a scalar; it is sharded if all tensors are sharded
    alike."""
    import torch

    tensors = list(tensors)
    if len(split(tensors, mesh)) == 1:
        return torch.nn.utils.get_total_norm(tensors, norm_type)
    with quiet("torch.distributed.tensor._redistribute"):  # advice to sum along both axes at once
        norms = [whole(torch.nn.utils.get_total_norm(part, norm_type)) for part in split(tensors, spread)]
    return torch.nn.utils.get_total_norm(norms, norm_type)


def gradient_norm(optimizer: Any, weights: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the norm of these weights' gradients as one vector, a scalar on their device. An optimizer that
    clips within its update (`clips_inside`) uses the norm of all its weights, in 32 bits."""
    if getattr(optimizer, "clips_inside", False):
        norm: torch.Tensor = optimizer.gradient_norm()
        return norm
    return total_norm(weight.grad for weight in weights if weight.grad is not None)


def clip(weights: Iterable[torch.Tensor], most: float, optimizer: Any = None) -> None:
    """Clip gradients in place to a global norm of `most`, as `torch.nn.utils.clip_grad_norm_` does; or let an
    optimizer do so in its update (`scale`)."""
    import torch

    weights = [weight for weight in weights if weight.grad is not None]
    if not getattr(optimizer, "clips_inside", False) and len(split(weights, mesh)) == 1:
        torch.nn.utils.clip_grad_norm_(weights, most)
    else:
        scale(weights, most, gradient_norm(optimizer, weights), optimizer)


def scale(weights: Iterable[torch.Tensor], most: float, norm: torch.Tensor, optimizer: Any = None) -> None:
    """Clip gradients of a known norm. An optimizer that clips within its update gets the norm, and gradients
    are not changed; its step must be the next one.
    """
    import torch

    if getattr(optimizer, "clips_inside", False):
        optimizer.clip_by(norm, most)
        return
    for part in split(weights, mesh):
        torch.nn.utils.clip_grads_with_norm_(part, most, norm)
