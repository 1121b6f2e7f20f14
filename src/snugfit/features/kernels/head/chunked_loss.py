"""Cross-entropy of a linear head in chunks of tokens, so that all logits never exist at once.

Logits of T tokens over a vocabulary of V take T x V elements four times: the head's output, a copy in 32
bits, softmax and gradient. Here they exist for one chunk of tokens at a time. Gradients are computed along
with the loss, in the forward pass, so no chunk is computed twice. The three products of hidden states and
head are the usual ones:

1. logits of the chunk, and the model's functions of them (Gemma's soft cap, Granite's scale);
2. their loss in 32 bits, and its gradient with respect to the head's own output: by autograd, or by a kernel
   that writes it in their place, where the head carries one (`LossKernel`);
3. from it the chunk's rows of the hidden states' gradient, and its share of the head's, which is added up.

The backward pass only multiplies both by its incoming gradient. Results equal those of a loss over all
logits. Only the head's gradient is added up in another order, in the dtype of the matrix products. In 16 bits
it is rounded once a chunk.

A chunk's gradient is taken from its logits and not from `torch.autograd.grad`. autograd's thread for the GPU
keeps a copy of the result of `grad` until its next task. With 192 chunks on an H200, 20 gradients lived until
the next one was computed, and peak memory rose by three of them.

In float16 gradients of single tokens vanish unless they are scaled first. The forward pass has no access to
the scaler's own scale. So there the gradients carry `FP16_SCALE` until the backward pass.

From torch 2.13 on, `torch.nn.functional.linear_cross_entropy` with options computes the same, and a test
compares the two. It is not used, for three reasons. It supports neither caps nor scales nor smoothed labels.
It is one operator, whose buffers a simulation cannot record. This code runs on every torch that snugfit
supports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional

from snugfit.techniques import roster
from snugfit.techniques.technique import Slot

FP16_SCALE = 4096.0
"""Factor on float16 gradients of the loss until the backward pass (chosen). Scaled gradients are above the
smallest float16 number (6e-8), and far below the largest one (65,504).
"""


LOSS_KERNEL = "loss_kernel"
"""Name of the attribute of an output head that holds the `LossKernel` for its logits."""


class LossKernel(Protocol):
    """Interface of kernels that compute the loss and gradient of a chunk of logits on a GPU."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return True if the kernels support this tensor's device and dtype."""

    def write_gradient(
        self, logits: torch.Tensor, labels: torch.Tensor, share: torch.Tensor, ignore_index: int
    ) -> torch.Tensor:
        """Return the loss of each token (T,) in 32 bits, and overwrite logits (T, V) with the gradient of
        `share` times the sum of the losses.
        """

    def multiply(self, values: torch.Tensor, factor: torch.Tensor) -> None:
        """Multiply a contiguous tensor in place by a scalar on its device, in 32 bits."""


class Loss(NamedTuple):
    """Settings of a cross-entropy, with the names of `torch.nn.functional.cross_entropy`."""

    mean: bool
    """True for the mean loss over labelled tokens; False for the sum."""
    ignore_index: int
    label_smoothing: float
    scores: Callable[[torch.Tensor], torch.Tensor]
    """Function from the head's raw output (tokens, V) to the model's logits, such as a soft cap."""
    kernel: LossKernel | None = None
    """Kernel for loss and gradient, used where it supports the logits; None for plain torch."""


class ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of hidden states (T, H), the head's weight (V, H) and bias (V,) or None, and labels (T,).

    The result is a single number in 32 bits, or in 64 where the products are. `Loss` has its settings. Logits
    are computed in `dtype`, for `tokens` tokens at a time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        loss: Loss,
        tokens: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Compute the cross-entropy chunk by chunk, and save its gradients."""
        given = (hidden, weight, bias)
        wide = torch.promote_types(dtype, torch.float32)
        matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
        kernel = loss.kernel if loss.kernel and loss.kernel.takes(hidden) else None
        gradients = _empty_gradients(ctx.needs_input_grad, hidden, matrix, offset, zeros=kernel is None)
        count = (labels != loss.ignore_index).sum().to(wide)
        scale = FP16_SCALE if dtype == torch.float16 else 1.0
        share = scale / count.clamp(min=1)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        for begin in range(0, len(hidden), tokens):
            rows = slice(begin, begin + tokens)
            some = hidden[rows].to(dtype)
            logits = functional.linear(some, matrix, offset)
            if kernel:
                total += kernel.write_gradient(logits, labels[rows], share, loss.ignore_index).sum()
                gradient = logits
            else:
                gradient = _gradient_in_torch(logits, labels[rows], loss, share, total)
            del logits
            _add(gradients, gradient, rows, some, matrix, is_first=kernel is not None and not begin)
            del gradient, some
        ctx.gradients = [
            sum_of_chunks if sum_of_chunks is None or like is None else sum_of_chunks.to(like.dtype)
            for sum_of_chunks, like in zip(gradients, given, strict=True)
        ]
        ctx.kernel = kernel
        ctx.factor = 1 / scale if loss.mean else count.clamp(min=1) / scale
        return total / count if loss.mean else total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the saved gradients, multiplied by the incoming gradient of the loss. Raises `RuntimeError`
        for a second pass."""
        if ctx.gradients is None:
            raise RuntimeError(
                "The gradients of this loss in chunks were used up by a first backward pass. For a loss that "
                f"goes backward twice choose {roster.plain(Slot.HEAD).name!r}."
            )
        gradients, ctx.gradients = ctx.gradients, None
        factor = gradient * ctx.factor
        for sum_of_chunks in gradients:
            if sum_of_chunks is not None and ctx.kernel:
                ctx.kernel.multiply(sum_of_chunks, factor)
            elif sum_of_chunks is not None:
                sum_of_chunks.mul_(factor)
        return (*gradients, None, None, None, None)


def _gradient_in_torch(
    logits: torch.Tensor, labels: torch.Tensor, loss: Loss, share: torch.Tensor, total: torch.Tensor
) -> torch.Tensor:
    """Compute a chunk's loss by autograd, and return the gradient of its logits times `share`. The loss is
    added to `total`.
    """
    with torch.enable_grad():
        scores = loss.scores(logits.requires_grad_()).to(total.dtype)
        summed = functional.cross_entropy(
            scores, labels, ignore_index=loss.ignore_index, reduction="sum",
            label_smoothing=loss.label_smoothing,
        )  # fmt: skip
    del scores
    summed.backward(share, inputs=[logits])
    gradient, logits.grad = logits.grad, None
    assert gradient is not None
    total += summed.detach()
    return gradient


def _empty_gradients(
    needed: tuple[bool, ...],
    hidden: torch.Tensor,
    matrix: torch.Tensor,
    offset: torch.Tensor | None,
    *,
    zeros: bool,
) -> list[torch.Tensor | None]:
    """Allocate gradients of hidden states, head and bias, in the dtype of the products; None for operands
    without a gradient. The head's gradient is uninitialised unless `zeros` is set.
    """
    make = torch.zeros_like if zeros else torch.empty_like
    return [
        torch.empty_like(hidden, dtype=matrix.dtype) if needed[0] else None,
        make(matrix) if needed[1] else None,
        torch.zeros_like(offset) if needed[2] and offset is not None else None,
    ]


def _add(
    gradients: list[torch.Tensor | None],
    gradient: torch.Tensor,  # (tokens, V)
    rows: slice,
    hidden: torch.Tensor,  # (tokens, H)
    matrix: torch.Tensor,  # (V, H)
    *,
    is_first: bool,
) -> None:
    """Add a chunk's gradients to the sums over all chunks; the first chunk overwrites the
    uninitialised sums.
    """
    of_hidden, of_weight, of_bias = gradients
    if of_hidden is not None:
        torch.mm(gradient, matrix, out=of_hidden[rows])
    if of_weight is not None and is_first:
        torch.mm(gradient.t(), hidden, out=of_weight)
    elif of_weight is not None:
        of_weight.addmm_(gradient.t(), hidden)
    if of_bias is not None:
        of_bias.add_(gradient.sum(0))
