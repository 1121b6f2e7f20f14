"""When does the autograd engine add two gradients in place?

Where several uses of a tensor send gradients back, the engine sums them as they arrive. It adds into the
first one when nobody else holds it (`can_accumulate_inplace`, `torch/csrc/autograd/input_buffer.cpp`: the
tensor's and its storage's use counts are 1, layout dense), but never while a dispatch mode is active. Under
the recorder the same addition arrives as `aten::add.Tensor`, with the engine's references plus those that
the way through Python adds. How many these are depends on the torch release, so they are counted once, in a
graph whose answer is known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from snugfit.errors import RehearsalError


class SoleOwner:
    """Tells additions that the engine would do in place from those that make a new tensor."""

    def __init__(self) -> None:
        self.tensor_uses, self.storage_uses = _counted()

    def may_add_in_place(self, arguments: tuple[Any, ...]) -> bool:
        """Whether the engine, without a dispatch mode, would add the second operand into the first."""
        if torch.is_grad_enabled() or len(arguments) != 2:
            return False
        held, other = arguments
        return (
            isinstance(other, torch.Tensor)
            and held.device.type == "meta"
            and held.shape == other.shape
            and held.dtype == other.dtype
            and held._use_count() <= self.tensor_uses
            and _storage_uses(held) <= self.storage_uses
            and torch._prims_common.is_non_overlapping_and_dense_or_false(held)
        )


def _storage_uses(tensor: torch.Tensor) -> int:
    uses: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return uses


class _Counter(TorchDispatchMode):
    """Notes the use counts of each addition's first operand during a backward pass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled():
            self.counts.append((args[0]._use_count(), _storage_uses(args[0])))
        elif isinstance(out, torch.Tensor):
            out.untyped_storage()  # as the recorder does, which gives the storage its Python object
        return out


def _counted() -> tuple[int, int]:
    """Use counts of a gradient that the engine alone holds, seen through a dispatch mode.

    In `2 * x + 3 * x` both gradients of x are fresh products, so the first is the engine's alone; in
    `x + x` both are one tensor, which is not.
    """
    x = torch.empty(4, device="meta", requires_grad=True)
    with _Counter() as alone:
        y = x * 1.0
        (y * 2 + y * 3).sum().backward()
    with _Counter() as shared:
        y = x * 1.0
        (y + y).sum().backward()
    if len(alone.counts) != 1 or len(shared.counts) != 1 or not _less(alone.counts[0], shared.counts[0]):
        raise RehearsalError(
            f"torch {torch.__version__} counts references in a way snugfit does not know "
            f"({alone.counts}, {shared.counts}), so gradient accumulation cannot be rehearsed."
        )
    tensor_uses, storage_uses = alone.counts[0]
    return tensor_uses, storage_uses


def _less(alone: tuple[int, int], shared: tuple[int, int]) -> bool:
    return alone[0] < shared[0] or alone[1] < shared[1]
