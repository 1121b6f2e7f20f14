"""What is taken of whole numbers and truths that depend on weights, of which a rehearsal has none.

- Choices (`topk`, `argmax`, `sort`: a router's) go evenly over what can be chosen: sample t takes the k after
  those of sample t - 1. Or, for the worst routing, all samples choose the same k.
- Conditions and masks hold everywhere: the upper bound of what a mask picks.
- Numbers are 1.

So is what is drawn by chance on the device.

They are values as any others (`shadows.py`), so that what is computed of them fits together: the tokens of
all experts are as many as were routed, and a mask and its opposite pick all of a tensor between them. But
each remembers on what it rests, and whoever asks for it is told.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

import torch

aten = torch.ops.aten


class Assumption(StrEnum):
    """On what a value rests, as a sentence that the asking line ends."""

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


class Assumed(NamedTuple):
    """A value that is assumed, and why."""

    assumption: Assumption
    """What it rests on."""
    make: Callable[[], torch.Tensor]
    """Makes it on the CPU."""


def assume(func: Any, args: tuple[Any, ...], index: int, out: torch.Tensor, routing: str) -> Assumed:
    """What is taken of result number `index` of an operator, whole numbers or truths of `out`'s shape, whose
    operands are not known."""
    shape, dtype = tuple(out.shape), out.dtype
    if dtype is torch.bool:
        return Assumed(Assumption.MASK, lambda: torch.ones(shape, dtype=dtype, device="cpu"))
    if index == _CHOICES.get(func, -1) and args[0].dim():
        balanced = routing == "balanced"
        options, dim, sorts = *_dimension(func, args, out), func in _SORTS
        return Assumed(
            Assumption.BALANCED if balanced else Assumption.WORST,
            lambda: _choices(shape, dim, options, spread=balanced, whole=sorts).to(dtype),
        )
    return Assumed(Assumption.NUMBER, lambda: torch.ones(shape, dtype=dtype, device="cpu"))


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
"""Operators that choose, and which of their results is the choice."""


def _dimension(func: Any, args: tuple[Any, ...], out: torch.Tensor) -> tuple[int, int]:
    """How many there are to choose from, and the dimension of the result along which choices lie: -1 where
    it is gone."""
    at = {aten.topk.default: 2, aten.sort.stable: 2, aten.argsort.stable: 2}.get(func, 1)
    dims = [one for one in args[at : at + 1] if type(one) is int]
    chosen_from = args[0]
    if not dims and func in (aten.argmax.default, aten.argmin.default):
        return chosen_from.numel(), -1
    dim = (dims[0] if dims else -1) % chosen_from.dim()
    return chosen_from.size(dim), dim if out.dim() == chosen_from.dim() else -1


def _choices(shape: tuple[int, ...], dim: int, options: int, *, spread: bool, whole: bool) -> torch.Tensor:
    """Choices below `options`: along `dim` different ones, and from sample to sample others if `spread`."""
    count = shape[dim] if dim >= 0 else 1
    samples = [size for at, size in enumerate(shape) if at != dim]
    first = torch.arange(torch.Size(samples).numel(), device="cpu") * (1 if whole else count)
    choices = first.view(*samples, 1) * int(spread) + torch.arange(count, device="cpu")
    choices = choices % max(options, 1)
    return choices.movedim(-1, dim) if dim >= 0 else choices[..., 0]
