"""Detect operators of a backward pass that would write in place if no dispatch mode were active.

If several uses of a tensor have gradients, the autograd engine sums them. It adds in place to the first
gradient if nothing else refers to that gradient (`can_accumulate_inplace`,
`torch/csrc/autograd/input_buffer.cpp`). That requires use counts of 1 for tensor and storage, and a dense
layout. With an active dispatch mode, it never adds in place. The recorder therefore receives the operator
`aten::add.Tensor`.

Derivatives that scatter a gradient into zeros also write in place, and out of place under a dispatch mode
(`areAnyTensorSubclassLike`).
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
    """Reference counts of a tensor: of its C++ object, of its storage, and of its Python object."""

    tensor: int
    storage: int
    python_object: int


aten = torch.ops.aten

SCATTERS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    # Sources: `index_backward` and `gather_backward` in `torch/csrc/autograd/FunctionsManual.cpp`.
    aten.index_put.default: lambda x: x[torch.zeros(2, dtype=torch.long, device="meta")],
    aten.scatter_add.default: lambda x: x.gather(0, torch.zeros(2, 4, dtype=torch.long, device="meta")),
    # Source for max, topk and sort: `value_selecting_reduction_backward` in `native/ReduceOps.cpp`.
    aten.scatter.src: lambda x: x.max(-1)[0],
    # Sources: `index_select_backward` and `masked_select_backward` in `native/TensorAdvancedIndexing.cpp`.
    aten.index_add.default: lambda x: x.index_select(0, torch.zeros(2, dtype=torch.long, device="meta")),
    aten.masked_scatter.default: lambda x: aten.masked_select(x, torch.ones_like(x, dtype=torch.bool)),
}
"""Operators that autograd runs in place on zeros it has created, each with a function whose backward formula
runs the operator.
"""


class SoleOwner:
    """Test that returns True for operators of a backward pass that run in place. They do so if nothing else
    refers to their first operand.
    """

    def __init__(self) -> None:
        # The reference counts come from private functions of torch, which another release may not have.
        try:
            self._most = {id(aten.add.Tensor): _addition_counts()}  # an operator itself hashes slowly
        except AttributeError as error:
            raise RehearsalError(
                f"torch {torch.__version__} does not report how often a tensor is used ({error}), so "
                "gradient accumulation cannot be predicted. Leave micro_batches out, or install "
                "another torch."
            ) from error
        for operator, example in SCATTERS.items():
            counts = _counts_in_backward(operator, example)
            # If the example ran several times or never, no count identifies a sole owner. The operator then
            # stays out of place.
            if len(counts) == 1:
                self._most[id(operator)] = counts[0]

    def writes_in_place(self, func: Any, arguments: tuple[Any, ...]) -> bool:
        """Return True if this operator of a backward pass would run in place without a dispatch mode."""
        most = self._most.get(id(func))
        if most is None or torch.is_grad_enabled() or arguments[0].device.type != "meta":
            # The engine writes in place only with gradient mode off, so a recomputed part never does.
            return False
        if any(uses > limit for uses, limit in zip(_use_counts(arguments), most, strict=True)):
            return False
        return (_CONDITIONS.get(func) or _always)(*arguments)


@functools.cache
def sole_owner(policy: Policy) -> SoleOwner:
    """Return the test for in-place operators of a backward pass, cached per policy. Its reference counts are
    measured while the policy is active.
    """
    return SoleOwner()


def _may_be_added(first: torch.Tensor, other: Any, *further: Any) -> bool:
    """Return True if autograd may add these gradients in place: same shape and dtype, the first one dense."""
    return (
        not further
        and isinstance(other, torch.Tensor)
        and first.shape == other.shape
        and first.dtype == other.dtype
        and torch._prims_common.is_non_overlapping_and_dense_or_false(first)
    )


def _always(*arguments: Any) -> bool:
    """Return True, for operators that autograd always runs in place."""
    return True


def _adds(operand: torch.Tensor, indices: Any, values: Any, accumulate: bool = False) -> bool:
    """Return True if `index_put` adds to its operand. Autograd writes without addition only to a copy, in the
    backward pass of an assignment to indices.
    """
    return accumulate


_CONDITIONS: dict[Any, Callable[..., bool]] = {aten.add.Tensor: _may_be_added, aten.index_put.default: _adds}
"""Functions of an operator's arguments that return True if the operator may run in place."""


def _use_counts(arguments: tuple[Any, ...]) -> UseCounts:
    first = arguments[0]
    # The counts include references of autograd's engine and of Python, which depend on the torch release.
    storage = torch._C._storage_Use_Count(first.untyped_storage()._cdata)
    return UseCounts(first._use_count(), storage, sys.getrefcount(first))


class _Counter(TorchDispatchMode):
    """A dispatch mode that counts references to the first operand of one operator during a backward pass."""

    def __init__(self, operator: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operator = operator
        self.counts: list[UseCounts] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that Dynamo does not skip this dispatch mode."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self.operator and not torch.is_grad_enabled():
            self.counts.append(_use_counts(args))
        selects = func is aten.masked_select.default  # its count depends on data: use two
        out = args[0].new_empty(2) if selects else func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            out.untyped_storage()  # as in the recorder; creates the storage's Python object
        return out


def _counts_in_backward(operator: Any, example: Callable[[torch.Tensor], torch.Tensor]) -> list[UseCounts]:
    """Return the reference counts of the first operand at each run of the operator in this example's backward
    pass.
    """
    x = torch.empty(4, 4, device="meta", requires_grad=True)
    counter = _Counter(operator)
    with torch.enable_grad(), counter:
        # A graph with a known result: its counts calibrate `writes_in_place` for this policy's own kernels.
        example(x * 1.0).sum().backward()
    return counter.counts


def _addition_counts() -> UseCounts:
    """Return the reference counts of a gradient that only the autograd engine refers to, under a dispatch
    mode.

    In `2 * x + 3 * x`, both gradients of x are new products, so only the engine references the first. The
    other example, `x + x`, sums one tensor with several references.
    """
    alone = _counts_in_backward(aten.add.Tensor, lambda x: x * 2 + x * 3)
    shared = _counts_in_backward(aten.add.Tensor, lambda x: x + x)
    # Equal counts in both cases could not separate a sole owner from a shared tensor.
    if len(alone) != 1 or len(shared) != 1 or not alone[0][:2] < shared[0][:2]:
        raise RehearsalError(
            f"torch {torch.__version__} counts references in a way that snugfit does not know ({alone}, "
            f"{shared}), so gradient accumulation cannot be predicted. Leave micro_batches out, or "
            "install another torch."
        )
    return alone[0]
