"""What an operator asks of the device: floating-point operations, bytes moved, shapes.

FLOPs of contractions come from torch's own registry (`torch.utils.flop_counter`: 2 per multiply-add, the
convention of all published figures). Everything else counts one operation an output element, which only
serves to group operators: such kernels are bound by the bytes they move, and those are counted exactly, each
input read once and each output written once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

CONTRACTIONS = "tensor contractions"
NORMALISATIONS = "statistical normalisations"
ELEMENTWISE = "element-wise"
GROUPS = (CONTRACTIONS, NORMALISATIONS, ELEMENTWISE)

_CONTRACTING = ("mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "dot", "convolution", "attention", "einsum")
_NORMALISING = ("norm", "softmax", "sum", "mean", "var", "std", "amax", "argmax", "cumsum", "nll_loss")

Description = tuple[int, int, tuple[tuple[int, ...], ...], str]
"""FLOPs, bytes read and written, shapes of the tensor inputs, dtype of the first."""


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
    moved = sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs))
    flops = _flops(func, args, kwargs, out)
    flops = sum(tensor.numel() for tensor in outputs) if flops is None else flops
    shapes = tuple(tuple(tensor.shape) for tensor in inputs[:3])
    return flops, moved, shapes, str(inputs[0].dtype if inputs else outputs[0].dtype)


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
