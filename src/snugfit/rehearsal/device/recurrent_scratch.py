"""Results and scratch of cuDNN's recurrent operators, in the order of `native/cudnn/RNN.cpp`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from snugfit.rehearsal.device.buffers import Buffer, Scratch, nest, output
from snugfit.rehearsal.device.recurrent_sizes import MODES, RecurrentShape

if TYPE_CHECKING:
    import torch


def _shape_of(x: torch.Tensor, options: Sequence[Any]) -> RecurrentShape:
    """From the input and the arguments from `mode` to `batch_sizes`."""
    mode, hidden, projected, layers, batch_first, dropout, train, both, batch_sizes = options
    if batch_sizes:
        steps, batch = len(batch_sizes), batch_sizes[0]
    else:
        steps, batch = (x.size(1), x.size(0)) if batch_first else (x.size(0), x.size(1))
    return RecurrentShape(
        kind=MODES[mode], steps=steps, batch=batch, inputs=x.size(-1), hidden=hidden, projected=projected,
        layers=layers, directions=1 + both, dtype=x.dtype, drops=train and dropout > 0,
        tokens=x.size(0) if batch_sizes else 0,
    )  # fmt: skip


def cudnn_rnn(
    x: torch.Tensor, weights: Any, per_layer: int, flat: Any, hx: Any, cx: Any, *options: Any
) -> tuple[Any, ...]:
    """The results of `_cudnn_rnn`: output, both states, reserve, and the buffer of the weights, of which
    nothing is new where they lie in one."""
    import torch

    shape, batch_first, train = _shape_of(x, options[:9]), options[4], options[6]
    packed = shape.tokens > 0
    width = shape.outputs * shape.directions
    out = x.new_empty((x.size(0), width) if packed else (shape.steps, shape.batch, width))
    reserve = torch.empty(shape.reserve_bytes() if train else 0, dtype=torch.uint8, device="meta")
    buffer = x.new_empty(shape.weight_elements() if flat is None else 0)
    return (
        out.transpose(0, 1) if batch_first and not packed else out,
        torch.empty_like(hx),
        torch.empty_like(cx) if cx is not None else hx.new_empty(0),
        reserve,
        buffer,
    )


def cudnn_rnn_backward(
    x: torch.Tensor, weights: Any, per_layer: int, flat: Any, hx: Any, cx: Any, *others: Any
) -> tuple[Any, ...]:
    """The gradients of input, states and weights; those of weights lie in one buffer, but for a network
    without biases."""
    from torch._utils import _unflatten_dense_tensors

    options, mask = others[4:13], others[15]
    shape, batch_first = _shape_of(x, options), options[4]
    dx = x.transpose(0, 1) if batch_first and not shape.tokens else x
    dx = dx.new_empty(dx.shape)
    whole = per_layer in (4, 5) and mask[3]
    of_weights: Sequence[torch.Tensor] = ()
    if whole:
        of_weights = _unflatten_dense_tensors(x.new_empty(shape.weight_elements()), weights)
    elif mask[3]:
        of_weights = [weight.new_empty(weight.shape) for weight in weights]
    return (
        dx.transpose(0, 1) if batch_first and not shape.tokens else dx,
        hx.new_empty(hx.shape),
        cx.new_empty(cx.shape) if cx is not None else None,
        of_weights,
    )


def forward_scratch(arguments: Sequence[Any], multiprocessors: int) -> Scratch:
    """What `_cudnn_rnn` allocates: a contiguous copy of the input where it is none, the outputs, then a
    workspace, during which the reserve is allocated."""
    x, options = arguments[0], arguments[6:15]
    shape = _shape_of(x, options)
    workspace = Buffer("cuDNN workspace", shape.workspace_bytes(multiprocessors, forward=True))
    outputs = (output(0), output(1), output(2), output(4))
    return nest(*_copy("input", x, shape, options), during=(*outputs, *nest(workspace, during=(output(3),))))


def backward_scratch(arguments: Sequence[Any], multiprocessors: int) -> Scratch:
    """What `_cudnn_rnn_backward` allocates: zeros for gradients that did not come, copies of what is not
    contiguous, the gradients of input and states, a workspace, the weights' gradients, and the workspace
    again."""
    x, _, per_layer, _, hx, cx, out, of_out, of_hidden, of_cell = arguments[:10]
    options, mask = arguments[10:19], arguments[21]
    shape = _shape_of(x, options)
    workspace = Buffer("cuDNN workspace", shape.workspace_bytes(multiprocessors, forward=False))
    missing = (("output's", out, of_out), ("hidden", hx, of_hidden), ("cell", cx, of_cell))
    zeros = [_whole(name, like) for name, like, came in missing if came is None and like is not None]
    copies = _copy("input", x, shape, options)
    gradients = () if of_out is None else _copy("gradient", of_out, shape, options)
    of_states = (output(0), output(1), output(2), *nest(workspace))
    data = nest(*copies, *gradients, during=of_states)
    of_weights: Scratch = ()
    if mask[3]:
        during: Scratch = (output(3), *nest(workspace))
        if per_layer not in (4, 5):
            whole = Buffer("gradients", shape.weight_elements() * x.element_size())
            during = nest(whole, during=nest(workspace, during=(output(3),)))
        of_weights = nest(*copies, during=during)
    return nest(*zeros, during=(*data, *of_weights))


def _copy(name: str, x: torch.Tensor, shape: RecurrentShape, options: Sequence[Any]) -> Scratch:
    by_steps = x.transpose(0, 1) if options[4] and not shape.tokens else x
    return () if by_steps.is_contiguous() else (_whole(name, x),)


def _whole(name: str, like: torch.Tensor) -> Buffer:
    return Buffer(name, like.numel() * like.element_size())
