"""Assume values for integers and booleans that depend on weights, which a simulation does not have.

- Chosen indices (`topk`, `argmax`, `sort`, as in a router) are spread evenly over the options. Sample t takes
  the k options after those of sample t - 1. With the worst routing, all samples choose the same k.
- Conditions and masks are true everywhere, which is the upper bound of a mask's selection.
- Numbers are 1.

The same assumptions apply to values that the device draws at random.

Assumed values are tracked on the CPU like known ones (`shadows.py`), so values computed from them are
consistent. For example, the experts' tokens add up to all tokens, and a mask and its inverse together select
a whole tensor. Each value has its assumption attached, and a read of the value adds a warning to the trace.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

import torch

aten = torch.ops.aten


class Assumption(StrEnum):
    """Reason for a value that a simulation assumes, such as a router's choice. The text is the start of a
    warning that ends with the line of code that reads the value.
    """

    BALANCED = (
        "Choices that depend on weights, such as a router's, are assumed to be spread evenly (balanced "
        "routing)"
    )
    WORST = (
        "Choices that depend on weights, such as a router's, are assumed to be all the same (worst routing)"
    )
    MASK = (
        "A condition that depends on weights or random numbers is assumed to be true (for a mask: everywhere)"
    )
    NUMBER = "A number that depends on weights or random numbers is assumed to be 1"


class AssumedTensor(NamedTuple):
    """A CPU tensor with assumed values for a tensor on `meta`, and the reason for the assumption."""

    assumption: Assumption
    """Reason why the value had to be assumed."""
    make: Callable[[], torch.Tensor]
    """Function that creates the tensor of assumed values on the CPU."""


def assume(func: Any, args: tuple[Any, ...], index: int, out: torch.Tensor, routing: str) -> AssumedTensor:
    """Return an assumed value for result number `index` of an operator with unknown operands.

    The result has integers or booleans, in `out`'s shape.
    """
    shape, dtype = tuple(out.shape), out.dtype
    if dtype is torch.bool:
        return AssumedTensor(Assumption.MASK, lambda: torch.ones(shape, dtype=dtype, device="cpu"))
    if index == _CHOICES.get(func, -1) and args[0].dim():
        balanced = routing == "balanced"
        options, dim, sorts = *_dimension(func, args, out), func in _SORTS
        return AssumedTensor(
            Assumption.BALANCED if balanced else Assumption.WORST,
            lambda: _choices(shape, dim, options, spread=balanced, whole=sorts).to(dtype),
        )
    return AssumedTensor(Assumption.NUMBER, lambda: torch.ones(shape, dtype=dtype, device="cpu"))


_SORTS = frozenset({aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable})

_CHOICES: dict[Any, int] = {
    aten.topk.default: 1,
    aten.max.dim: 1,
    aten.min.dim: 1,
    aten.argmax.default: 0,
    aten.argmin.default: 0,
    aten.sort.default: 1,
    aten.sort.stable: 1,
    aten.argsort.default: 0,
    aten.argsort.stable: 0,
}
"""Operators that choose among options, each with the index of the output that contains the chosen indices."""


def _dimension(func: Any, args: tuple[Any, ...], out: torch.Tensor) -> tuple[int, int]:
    """Return the number of options of an operator such as `topk`, and its result's dimension of chosen
    indices (-1 if reduced).
    """
    # Position of `dim`: `topk` has `k` in front of it.
    at = {aten.topk.default: 2, aten.sort.stable: 2, aten.argsort.stable: 2}.get(func, 1)
    dims = [argument for argument in args[at : at + 1] if type(argument) is int]
    chosen_from = args[0]
    # Without `dim`, these return an index into the flattened tensor.
    if not dims and func in (aten.argmax.default, aten.argmin.default):
        return chosen_from.numel(), -1
    dim = (dims[0] if dims else -1) % chosen_from.dim()
    return chosen_from.size(dim), dim if out.dim() == chosen_from.dim() else -1


def _choices(shape: tuple[int, ...], dim: int, options: int, *, spread: bool, whole: bool) -> torch.Tensor:
    """Return int64 indices below `options` in this shape, as results of `topk` or `argmax`. They differ along
    `dim`, and between samples if `spread`.
    """
    count = shape[dim] if dim >= 0 else 1
    samples = [size for at, size in enumerate(shape) if at != dim]
    # A sort uses every option, so a shift by `count` would not change the choices.
    first = torch.arange(torch.Size(samples).numel(), device="cpu") * (1 if whole else count)
    choices = first.view(*samples, 1) * int(spread) + torch.arange(count, device="cpu")
    # An empty dimension has no options; `max` avoids a division by zero.
    choices = choices % max(options, 1)
    return choices.movedim(-1, dim) if dim >= 0 else choices[..., 0]
