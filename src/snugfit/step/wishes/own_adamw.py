"""Base class of AdamW variants with a separate update, and functions that they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from snugfit.errors import RecipeError

STEP = "step"
"""Key of an optimizer's state under which it stores a weight's number of steps."""


class OwnAdamW(torch.optim.Optimizer):
    """Base class of AdamW variants: it has the arguments and defaults of torch's AdamW, without an update."""

    further: ClassVar[Mapping[str, Any]] = {}
    """Further arguments of a subclass, with their defaults. They are stored in the parameter groups too."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **further: Any,
    ) -> None:
        """Store the hyperparameters in the defaults of each parameter group."""
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**numbers, **self.further, **further})


def move_moments(
    first: torch.Tensor,
    second: torch.Tensor,
    slope: torch.Tensor,
    first_share: float,
    second_keep: float,
    second_share: float,
    root: float,
    eps: float,
) -> torch.Tensor:
    """Update both moments by these gradients with the same operations as torch's `_single_tensor_adam`.

    Return the divisor of the update. `root` is the square root of the second moment's bias correction.
    """
    first.lerp_(slope, first_share)
    second.mul_(second_keep).addcmul_(slope, slope, value=second_share)
    return second.sqrt().div_(root).add_(eps)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor in memory order as a 1-d view. Raises `RecipeError` for a tensor with
    gaps or overlapping elements."""
    if not torch.ops.aten.is_non_overlapping_and_dense.default(tensor):
        raise RecipeError(
            f"The recipe's optimizer needs weights without gaps in memory, but one of shape "
            f"{tuple(tensor.shape)} has strides {tensor.stride()}. Make it contiguous(), or try "
            "'bf16 + adamw'."
        )
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def with_strides_of(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient with the strides of its weight, as autograd returns it wherever possible. Raises
    `RecipeError` for a sparse one, and for one of another dtype.
    """
    if gradient.layout is not torch.strided:
        raise RecipeError(
            "The recipe's optimizer takes no sparse gradients. Try sparse=False, or 'bf16 + sgd'."
        )
    if gradient.dtype is not weight.dtype:
        raise RecipeError(
            f"A weight that is {weight.dtype} has a gradient that is {gradient.dtype}. Cast the "
            "gradient to the weight's dtype."
        )
    # The strides of a single element have no meaning.
    if gradient.stride() == weight.stride() or weight.numel() < 2:
        return gradient
    return torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
