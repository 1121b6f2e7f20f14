"""What attention over sequences of several lengths computes, by the lengths that follow from the batch.

FlashAttention's kernels for such sequences are told where each ends. torch's formula for their FLOPs reads
that on the device; on shapes it takes each sequence for as long as the longest. A padded row of an encoder is
three stretches, of which two are short or empty (`step/wishes/kernels/padded.py`), so that would be three
times too much and more. The batch is known, and so are the ends.

The kernels compute squares of `TILE` queries by as many keys, whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from snugfit.rehearsal.record.kernels import KernelCost
    from snugfit.rehearsal.record.shadow import View

TILE = 128
"""Queries and keys of a square: those of the kernels that an H200 runs for RoBERTa-large, as their names say
(results/h200-2026-11-27/profile-roberta.json)."""

_ENDS = {"aten::_flash_attention_forward": 3, "aten::_flash_attention_backward": 6}
"""By operator, which argument has the ends of queries' sequences; the next one has those of keys, and then
come the longest lengths of both."""


def cost_by_lengths(
    cost: KernelCost | None,
    operator: str,
    args: tuple[Any, ...],
    view_of: Callable[[torch.Tensor], View | None],
) -> KernelCost | None:
    """The cost of an operator, whose FLOPs are those of the sequences that it has, where it is such attention
    and their ends are known."""
    at = _ENDS.get(operator)
    if cost is None or at is None or args[at] is None:
        return cost
    ends = [_numbers(one, view_of) for one in args[at : at + 2]]
    if ends[0] is None or ends[1] is None:
        return cost
    lengths = [one.diff() for one in ends if one is not None]
    queries, keys = (-(-one // TILE) * TILE for one in lengths)
    whole = len(lengths[0]) * int(args[at + 2]) * int(args[at + 3])
    share = min(1.0, int((queries * keys).sum()) / whole) if whole else 1.0
    return cost._replace(flops=int(cost.flops * share))


def _numbers(ends: torch.Tensor, view_of: Callable[[torch.Tensor], View | None]) -> torch.Tensor | None:
    from snugfit.rehearsal.record.shadow import NotFollowed

    view = view_of(ends) if ends.is_meta else None
    try:
        return None if view is None else view.tensor().long()
    except NotFollowed:
        return None
