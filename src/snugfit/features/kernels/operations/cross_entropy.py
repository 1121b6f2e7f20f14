"""Cross-entropy of logits in one kernel, which overwrites the logits with their gradient.

In plain torch logits of 16 bits are cast to 32, and their softmax is saved. Its gradient and that of the cast
follow. That is six tensors of the logits' size, all in 32 bits but two. Here a program reads a token's logits
twice, for the sum of their exponentials and for the gradient. It writes the token's loss.

In the backward pass, the stored gradients of a loss in chunks are multiplied by the loss's own gradient. This
factor is one unless the batch is split; the kernel then does nothing. On a GPU, torch rounds a 32-bit scalar
to 16 bits before it multiplies a 16-bit tensor. It also reads elements one by one.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from snugfit.features.kernels.operations.operators import define, has_kernel

_CROSS_ENTROPY_GRADIENT = define(
    "cross_entropy_gradient(Tensor(a!) logits, Tensor labels, Tensor share, int ignore_index, *, Tensor(b!) "
    "losses) -> ()",
    "cross_entropy",
)


_MULTIPLY = define("multiply(Tensor(a!) values, Tensor factor) -> ()", "cross_entropy")


def multiply(values: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply a contiguous tensor in place by a scalar on its device, in 32 bits."""
    _MULTIPLY(values, factor)


def reference_multiply(values: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply `values` in place by a scalar, in plain torch."""
    values.copy_(values.to(torch.float32) * factor)


def write_gradient(
    logits: torch.Tensor, labels: torch.Tensor, share: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    """Overwrite logits (T, V) with their gradient, and return the loss of each token (T,) in 32 bits.

    The gradient is that of `share` times the sum of the losses. Tokens with the ignored label have zero loss
    and zero gradient.
    """
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    _CROSS_ENTROPY_GRADIENT(logits, labels, share, ignore_index, losses=losses)
    return losses


def reference(
    logits: torch.Tensor, labels: torch.Tensor, share: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    """Overwrite logits (T, V) with their gradient in plain torch, and return the losses (T,)."""
    with torch.enable_grad():
        # The logits are overwritten below, so the reference differentiates a copy.
        leaf = logits.detach().clone().requires_grad_()
        losses = functional.cross_entropy(
            leaf.to(torch.float32), labels, ignore_index=ignore_index, reduction="none"
        )
        summed = losses.sum()
    logits.copy_(torch.autograd.grad(summed, leaf, share.to(summed.dtype))[0])
    return losses.detach()


class CrossEntropyKernel:
    """Triton kernels that compute the loss and gradient of a chunk of logits (`LossKernel`)."""

    takes = staticmethod(has_kernel)
    write_gradient = staticmethod(write_gradient)
    multiply = staticmethod(multiply)
