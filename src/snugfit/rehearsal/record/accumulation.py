"""When the backward pass writes into a tensor that it holds, where a dispatch mode sees a new one.

Where several uses of a tensor send gradients back, the engine sums them as they arrive. It adds into the
first one when nobody else holds it (`can_accumulate_inplace`, `torch/csrc/autograd/input_buffer.cpp`: the
tensor's and its storage's use counts are 1, layout dense), but never while a dispatch mode is active. Under
the recorder the same addition arrives as `aten::add.Tensor`, with the engine's references plus those that
the way through Python adds. How many these are depends on the torch release, and on a policy's own kernels on
that way (autocast's, for `index_put` and `scatter_add`), so they are counted when the first recording under a
policy begins, in a graph whose answer is known. A tensor that Python code holds (a backward written in
Python) has more.

Derivatives that scatter a gradient into zeros do so in place likewise, and out of place under a dispatch
mode (`areAnyTensorSubclassLike`): `index_backward` and `gather_backward`
(`torch/csrc/autograd/FunctionsManual.cpp`), those of max, topk and sort
(`value_selecting_reduction_backward`, `native/ReduceOps.cpp`), `index_select_backward` and
`masked_select_backward` (`native/TensorAdvancedIndexing.cpp`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from snugfit.errors import RehearsalError

if TYPE_CHECKING:
    from snugfit.rehearsal.device.policy import Policy


class UseCounts(NamedTuple):
    """How many references keep a tensor, its storage, and its Python object."""

    tensor: int
    storage: int
    python_object: int


aten = torch.ops.aten

SCATTERS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    aten.index_put.default: lambda x: x[torch.zeros(2, dtype=torch.long, device="meta")],
    aten.scatter_add.default: lambda x: x.gather(0, torch.zeros(2, 4, dtype=torch.long, device="meta")),
    aten.scatter.src: lambda x: x.max(-1)[0],
    aten.index_add.default: lambda x: x.index_select(0, torch.zeros(2, dtype=torch.long, device="meta")),
    aten.masked_scatter.default: lambda x: aten.masked_select(x, torch.ones_like(x, dtype=torch.bool)),
}
"""Operators that a derivative runs in place on zeros of its own, and what has such a derivative."""


class SoleOwner:
    """Tells which operators of a backward pass write into their first operand and make nothing new."""

    def __init__(self) -> None:
        try:
            self._most = {id(aten.add.Tensor): _addition_counts()}  # an operator itself hashes slowly
        except AttributeError as error:
            raise RehearsalError(
                f"torch {torch.__version__} does not report how often a tensor is used ({error}), so "
                "gradient accumulation cannot be predicted."
            ) from error
        for operator, example in SCATTERS.items():
            counts = _counts_in_backward(operator, example)
            if len(counts) == 1:
                self._most[id(operator)] = counts[0]

    def writes_in_place(self, func: Any, arguments: tuple[Any, ...]) -> bool:
        """Whether this operator of a backward pass, without a dispatch mode, would be done in place."""
        most = self._most.get(id(func))
        if most is None or torch.is_grad_enabled() or arguments[0].device.type != "meta":
            return False
        if any(uses > limit for uses, limit in zip(_use_counts(arguments), most, strict=True)):
            return False
        return func is not aten.add.Tensor or (len(arguments) == 2 and _may_be_added(*arguments))


@functools.cache
def sole_owner(policy: Policy) -> SoleOwner:
    """Counted once, while this policy is in force."""
    return SoleOwner()


def _may_be_added(first: torch.Tensor, other: Any) -> bool:
    """Whether the engine may add these gradients in place: same shape and dtype, the first one dense."""
    return (
        isinstance(other, torch.Tensor)
        and first.shape == other.shape
        and first.dtype == other.dtype
        and torch._prims_common.is_non_overlapping_and_dense_or_false(first)
    )


def _use_counts(arguments: tuple[Any, ...]) -> UseCounts:
    first = arguments[0]
    storage = torch._C._storage_Use_Count(first.untyped_storage()._cdata)
    return UseCounts(first._use_count(), storage, sys.getrefcount(first))


class _Counter(TorchDispatchMode):
    """Counts who holds the first operand of an operator during a backward pass."""

    def __init__(self, operator: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operator = operator
        self.counts: list[UseCounts] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As the recorder does."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self.operator and not torch.is_grad_enabled():
            self.counts.append(_use_counts(args))
        selects = func is aten.masked_select.default  # how many depends on data: take two
        out = args[0].new_empty(2) if selects else func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            out.untyped_storage()  # as the recorder does, which gives the storage its Python object
        return out


def _counts_in_backward(operator: Any, example: Callable[[torch.Tensor], torch.Tensor]) -> list[UseCounts]:
    """Of each time that this example's backward pass runs the operator."""
    x = torch.empty(4, 4, device="meta", requires_grad=True)
    counter = _Counter(operator)
    with torch.enable_grad(), counter:
        example(x * 1.0).sum().backward()
    return counter.counts


def _addition_counts() -> UseCounts:
    """Who holds a gradient that is the engine's alone, seen through a dispatch mode.

    In `2 * x + 3 * x` both gradients of x are fresh products, so the first is the engine's alone; in
    `x + x` both are one tensor, which is not.
    """
    alone = _counts_in_backward(aten.add.Tensor, lambda x: x * 2 + x * 3)
    shared = _counts_in_backward(aten.add.Tensor, lambda x: x + x)
    if len(alone) != 1 or len(shared) != 1 or not alone[0][:2] < shared[0][:2]:
        raise RehearsalError(
            f"torch {torch.__version__} counts references in a way that snugfit does not know ({alone}, "
            f"{shared}), so gradient accumulation cannot be predicted."
        )
    return alone[0]
