"""What an operator asks of the device: floating-point operations, bytes moved, shapes.

FLOPs of contractions come from torch's own registry (`torch.utils.flop_counter`: 2 per multiply-add, the
convention of all published figures). Everything else counts one operation an output element, which only
serves to group operators: such kernels are bound by the bytes they move, and those are counted exactly, each
input read once and each output written once, an operand that is written into too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

CONTRACTIONS = "tensor contractions"
NORMALISATIONS = "statistical normalisations"
ELEMENTWISE = "element-wise"
TF32 = "tf32"
GROUPS = (CONTRACTIONS, NORMALISATIONS, ELEMENTWISE)

_CONTRACTING = ("mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "dot", "convolution", "attention", "einsum")
_NORMALISING = ("norm", "softmax", "sum", "mean", "var", "std", "amax", "argmax", "cumsum", "nll_loss")

Description = tuple[int, int, tuple[tuple[int, ...], ...], str, int]
"""FLOPs, bytes read and written, shapes of the first tensor inputs, dtype, number of tensor inputs."""


def group_of(operator: str) -> str:
    """The operator group of an operator, after the three classes of "Data Movement Is All You Need"
    (Ivanov et al., arXiv 2007.00072): contractions, statistical normalisations, element-wise."""
    name = operator.rsplit("::", maxsplit=1)[-1].strip("_")
    if any(word in name for word in ("attention", "convolution")) or name in _CONTRACTING:
        return CONTRACTIONS
    if any(word in name for word in _NORMALISING):
        return NORMALISATIONS
    return ELEMENTWISE


def describe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Description | None:
    """What the kernel of this operator does; None for views and for operators that run no kernel."""
    if func.is_view or func._schema.name in _NO_KERNEL:
        return None
    inputs = [*_tensors(args), *_tensors(kwargs.values())]
    outputs = list(_tensors((out,)))
    if not any(tensor.device.type == "meta" for tensor in (*inputs, *outputs)):
        return None
    returned = {id(tensor) for tensor in outputs}
    outputs += [tensor for tensor in _tensors(_written(func, args, kwargs)) if id(tensor) not in returned]
    moved = sum(map(_nbytes, (*inputs, *outputs)))
    if func._schema.name in _GATHERING:  # reads the rows that it was asked for, not the whole table
        moved -= max(0, _nbytes(inputs[0]) - sum(map(_nbytes, outputs)))
    flops = _flops(func, args, kwargs, out)
    flops = sum(tensor.numel() for tensor in outputs) if flops is None else flops
    shapes = tuple(tuple(tensor.shape) for tensor in inputs[:3])
    return flops, moved, shapes, _arithmetic(func, (inputs or outputs)[0]), len(inputs)


def apart(args: tuple[Any, ...], kwargs: dict[str, Any], kernel: Description) -> list[Description]:
    """A grouped product as so many products of equal groups: (M, K) by (G, K, N) by rows, (N, M) by (M, K) by
    what they have in common."""
    flops, moved, _, dtype, tensors = kernel
    ends = args[2] if len(args) > 2 else kwargs.get("offs")
    groups = args[0].size(0) if ends is None else ends.size(0)
    (rows, inner), columns = args[0].shape[-2:], args[1].shape[-1]
    if args[0].dim() == args[1].dim():
        inner = -(-inner // groups)
    else:
        rows = -(-rows // groups)
    each = (flops // groups, moved // groups, ((rows, inner), (inner, columns)), dtype, min(tensors, 2))
    return [each] * groups


def copies_in(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this operator copies a host's tensor to the device."""
    return func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu"


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that the operator writes into, returned or not."""
    places, names = _places_written(func)
    return [args[place] for place in places if place < len(args)] + [
        kwargs[name] for name in names if name in kwargs
    ]


@functools.cache
def _places_written(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    written = [
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tuple(place for place, _ in written), tuple(name for _, name in written)


def _arithmetic(func: Any, operand: torch.Tensor) -> str:
    """What the kernel computes in: its operand's dtype, but for products and convolutions in TF32."""
    if operand.dtype is torch.float32 and func._schema.name in PRODUCTS:
        backends: Any = torch.backends
        where = backends.cudnn.conv if "conv" in func._schema.name else backends.cuda.matmul
        return TF32 if where.fp32_precision == TF32 else str(operand.dtype)
    return str(operand.dtype)


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int | None:
    """By torch's registry; None where it has no formula. Its formulas for attention know no grouped queries:
    keys and values then count once for each query head that uses them."""
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return None
    first = 1 if "backward" in func._schema.name else 0
    if "attention" in func._schema.name and args[first].size(1) != args[first + 1].size(1):
        heads = args[first].size(1)
        ungrouped = [
            each.new_empty((each.size(0), heads, *each.shape[2:])) for each in args[first + 1 : first + 3]
        ]
        args = (*args[: first + 1], *ungrouped, *args[first + 3 :])
    return int(formula(*args, **kwargs, out_val=out))


PRODUCTS = frozenset(
    {
        "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm", "aten::convolution",
        "aten::convolution_backward",
    }
)  # fmt: skip
"""Operators of fp32 tensors that torch hands to cuBLAS and cuDNN, which may compute them in TF32."""

_GATHERING = frozenset({"aten::embedding", "aten::index", "aten::index_select", "aten::gather"})

_NO_KERNEL = frozenset(
    {
        "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::detach", "aten::alias",
        "aten::lift_fresh", "aten::new_empty", "aten::new_empty_strided", "aten::_unsafe_view",
        "prim::device", "aten::resize_",
    }
)  # fmt: skip


def _tensors(values: Any) -> Any:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
