"""Classifiers that read each sequence at its end token (T5, BART): how many of a mask are true.

They look for the end token in the batch (`input_ids.eq(eos)`), check that each sequence has as many
(`unique_consecutive` of the counts), and gather the hidden states there by the mask. How much that gives
depends on data, of which a rehearsal has none; but a batch of ours holds exactly one end token in each
sequence (`job/batch.py`). So those three questions are answered here, and only for masks that were made so:
any other that depends on data is refused as before.

Gathering by a mask is what torch makes of it on a device: `nonzero` (for which the host waits) and `index`,
and in backward `nonzero` once more, of the mask that was saved, and `index_put`. What `nonzero` and
`unique_consecutive` take for themselves is gone before the head of the classifier runs, and left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten

ONE_A_ROW = "_snugfit_one_a_row"
"""Attribute of a mask of which one is true in each row, and of its count of each row."""


class EndTokens(TorchFunctionMode):
    """Knows where our batches have their end tokens; `waits` is called when the host would wait."""

    def __init__(self, end: int, waits: Callable[[], None]) -> None:
        super().__init__()
        self.end, self.waits = end, waits

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__getitem__ and isinstance(args[1], tuple) and _is_one_a_row(args[1][0]):
            rows = _GatherOneARow.apply(args[0], args[1][0], self.waits)  # type: ignore[no-untyped-call]
            return func(rows, (slice(None), *args[1][1:]))
        if func is torch.unique_consecutive and _is_one_a_row(args[0]):
            self.waits()
            return args[0].new_empty(args[0].shape)[:1]
        out = func(*args, **kwargs)
        if self._looks_for_ends(func, args) or _counts_them(func, args):
            setattr(out, ONE_A_ROW, True)
        return out

    def _looks_for_ends(self, func: Any, args: tuple[Any, ...]) -> bool:
        compares = func is torch.Tensor.eq and type(args[1]) is int and args[1] == self.end
        return compares and args[0].dim() == 2


def _counts_them(func: Any, args: tuple[Any, ...]) -> bool:
    return func is torch.Tensor.sum and _is_one_a_row(args[0]) and args[1:] == (1,)


def _is_one_a_row(tensor: Any) -> bool:
    """Whether it is such a mask, or the count of one."""
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, ONE_A_ROW)


class _GatherOneARow(torch.autograd.Function):
    """One row of hidden states for each sequence: `hidden[mask]`, (B, S, D) to (B, D). Keeps the mask for
    backward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, mask: torch.Tensor, waits: Callable[[], None]) -> Any:
        ctx.save_for_backward(mask)
        ctx.shape, ctx.waits = hidden.shape, waits
        with torch._C._AutoDispatchBelowAutograd():
            return aten.index(hidden, list(_indices(mask, waits)))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        with torch._C._AutoDispatchBelowAutograd():
            zeros = gradient.new_zeros(ctx.shape)
            indices = list(_indices(mask, ctx.waits))
            return aten.index_put_(zeros, indices, gradient, True), None, None


def _indices(mask: torch.Tensor, waits: Callable[[], None]) -> tuple[torch.Tensor, ...]:
    """Rows and columns, (B,) each, of what is true in a mask (B, S), as views of what `nonzero` gives."""
    waits()
    indices: torch.Tensor = aten.nonzero_static(mask, size=mask.size(0))
    return indices.unbind(1)
