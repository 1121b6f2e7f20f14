"""Weights that lie behind one another in memory, so that one product takes them all.

A model's three projections of the same input are one product, if their weights are rows of one matrix. They
stay three parameters with their names: each one's data becomes a part of one buffer, once. Whoever moves or
casts a model takes them apart again; then they are put together for each product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def lay_together(parameters: Sequence[torch.Tensor]) -> None:
    """Moves the data of parameters that are alike but for their first size into one buffer, in order."""
    if is_adjacent(parameters):
        return
    with torch.no_grad():
        buffer = parameters[0].new_empty((sum(map(len, parameters)), *parameters[0].shape[1:]))
        for parameter, part in zip(parameters, buffer.split([*map(len, parameters)]), strict=True):
            part.copy_(parameter)
            parameter.data = part


def is_adjacent(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether each begins in memory where the one before it ends, in one allocation."""
    first = tensors[0]
    storage, at = first.untyped_storage()._cdata, first.storage_offset()
    for tensor in tensors:
        if (
            tensor.storage_offset() != at
            or tensor.dtype != first.dtype
            or tensor.untyped_storage()._cdata != storage
            or not tensor.is_contiguous()
        ):
            return False
        at += tensor.numel()
    return True


def join_rows(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """All of them as one (rows of all, ...), in this dtype: a view where they are adjacent."""
    first = tensors[0]
    if len(tensors) == 1:
        whole = first.detach()
    elif is_adjacent(tensors):
        shape = (sum(map(len, tensors)), *first.shape[1:])
        whole = first.detach().as_strided(shape, first.stride())
    else:
        whole = torch.cat([tensor.detach() for tensor in tensors])
    return whole.to(dtype)
