"""Several linear layers of one input, such as queries, keys and values, as one matrix product.

The layers keep weights and gradients of their own. Their weights are copied once into adjacent parts of one
buffer, so that the joint weight is a view. Weights that another library moves apart are copied side by side
in each pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from snugfit.features.kernels.operations.join_slopes import join_slopes
from snugfit.features.kernels.operations.operators import activation_dtype, autocast_device


def is_plain(layer: Any) -> bool:
    """Return True if a linear layer is torch's own, without a wrapper or hook."""
    is_own = type(layer) is torch.nn.Linear and type(layer.weight) is torch.nn.Parameter
    # A hook or a wrapper must be called with this layer's input.
    return is_own and not (layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))


def lay_side_by_side(tensors: Sequence[torch.Tensor]) -> None:
    """Move parameters of one dtype into adjacent slices of one buffer, in this order.

    All their dimensions but the first are equal.
    """
    if joint_view(tensors) is not None or len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
        return
    with torch.no_grad():
        buffer = torch.cat([tensor.data for tensor in tensors])
        start = 0
        for tensor in tensors:
            # Assigning `data` moves the memory and keeps the parameter, which optimizers and tied modules
            # refer to.
            tensor.data = buffer[start : start + tensor.size(0)]
            start += tensor.size(0)


def joint_view(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensors as one view along the first dimension; None where they are not adjacent."""
    first = tensors[0]
    at, storage = first.storage_offset(), first.untyped_storage()._cdata
    rows = 0
    for tensor in tensors:
        same_layout = (tensor.dtype, tensor.stride(), tensor.shape[1:]) == (
            first.dtype,
            first.stride(),
            first.shape[1:],
        )
        # The next tensor must begin where the previous one ends.
        is_adjacent = tensor.untyped_storage()._cdata == storage and tensor.storage_offset() == at
        if not (same_layout and is_adjacent and tensor.is_contiguous()):
            return None
        at, rows = at + tensor.numel(), rows + tensor.size(0)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def join_weights(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return these weights concatenated along the first dimension, in this dtype.

    It is a view where they are adjacent and have the dtype.
    """
    view = joint_view(tensors)
    # A cast or a move has separated the weights in memory, so this pass concatenates them again.
    return (torch.cat([tensor.detach() for tensor in tensors]) if view is None else view).to(dtype)


def weights_to_keep(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the tensors that a backward pass needs for the joint weight in this dtype, in order.

    That is the joint weight, or the weights themselves if only a copy could join them.
    """
    # A saved copy would keep weights alive that FSDP2 frees after the forward pass.
    if joint_view(tensors) is None and all(tensor.dtype == dtype for tensor in tensors):
        return [tensor.detach() for tensor in tensors]
    return [join_weights(tensors, dtype)]


def joint_linear(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return the results (..., N) of linear layers for one `x` (..., H), in autocast's dtype where that is
    on.

    Weights are (N, H), biases (N; all or none). The results are views of one tensor, so their rows are
    strided.
    """
    results: tuple[torch.Tensor, ...] = JointLinear.apply(  # type: ignore[no-untyped-call]
        x, len(weights), *weights, *biases
    )
    return results


class JointLinear(torch.autograd.Function):
    """Autograd function of `joint_linear`: one matrix product forward, two backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int, *tensors: torch.Tensor) -> Any:
        """Return the results, as views of one tensor."""
        weights, biases = tensors[:count], tensors[count:]
        dtype = activation_dtype(x)
        saved = weights_to_keep(weights, dtype)
        weight = join_weights(saved, dtype)
        bias = join_weights(biases, dtype) if biases else None
        # Weights are already cast. Autocast would cast them again, and cache views.
        with torch.autocast(autocast_device(x), enabled=False):
            inner = x.to(dtype)
            joint = torch.nn.functional.linear(inner, weight, bias)
        ctx.save_for_backward(inner, *saved)
        ctx.dtypes = x.dtype, weights[0].dtype, biases[0].dtype if biases else None
        ctx.sizes = [part.size(0) for part in weights]
        return joint.split(ctx.sizes, dim=-1)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> Any:
        """Return the gradients of `x`, and of each weight and bias a slice of one tensor."""
        x, *saved = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        needs = ctx.needs_input_grad
        count = len(ctx.sizes)
        # The bias's gradient is a by-product of joining the gradients.
        trains_bias = bias_dtype is not None and any(needs[2 + count :])
        slope, dbias = join_slopes(slopes, bias_dtype if trains_bias else None)  # (rows, all columns)
        dx = None
        if needs[0]:
            dx = torch.mm(slope, join_weights(saved, slope.dtype)).view(x.shape).to(x_dtype)
        dweights: Sequence[torch.Tensor | None] = [None] * count
        dbiases: Sequence[torch.Tensor | None] = [None] * count if bias_dtype else []
        if any(needs[2 : 2 + count]):
            # A single product gives the gradients of all weights as slices.
            dweights = torch.mm(slope.t(), x.flatten(0, -2)).to(weight_dtype).split(ctx.sizes)
        if dbias is not None:
            dbiases = dbias.split(ctx.sizes)
        return dx, None, *dweights, *dbiases
