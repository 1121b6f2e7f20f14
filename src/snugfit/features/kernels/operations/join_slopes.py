"""Joining of the gradients of queries, keys and values into one tensor, with the gradient of their bias
(column sums).

Attention's backward pass returns three tensors, but the matrix product before it needs one. The kernel that
copies them also adds up the bias's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from snugfit.features.kernels.operations.column_sums import add_partials, empty_partials
from snugfit.features.kernels.operations.operators import define, has_kernel

BLOCK_COLUMNS = 1024
"""Largest number of columns in one kernel program (chosen)."""

BLOCK_ROWS = 4
"""Number of rows that a kernel program processes at a time (chosen)."""

copy_slopes = define(
    "copy_slopes(Tensor first, Tensor second, Tensor third, *, Tensor(a!) joint, Tensor(b!)? partials) -> ()",
    "join_slopes",
)


def join_slopes(
    slopes: Sequence[torch.Tensor], bias_dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Join the gradients (..., N each) of linear layers with one input into (rows, all columns).

    The second result is the gradient of their biases together (all columns) in `bias_dtype`; None without
    biases.
    """
    first = slopes[0]
    # The kernel takes three parts of equal shape. torch joins those of grouped queries.
    same_layout = len(slopes) == 3 and all(
        (tensor.shape, tensor.dtype) == (first.shape, first.dtype) for tensor in slopes
    )
    if not same_layout or not has_kernel(first):
        joint = torch.cat(tuple(slopes), dim=-1).flatten(0, -2)
        return joint, None if bias_dtype is None else joint.sum(0).to(bias_dtype)
    columns = first.size(-1)
    rows = first.numel() // columns
    joint = first.new_empty((rows, 3 * columns))
    partials = None if bias_dtype is None else empty_partials(joint, 1, BLOCK_ROWS)
    # Attention may return strided gradients.
    copy_slopes(*(tensor.contiguous() for tensor in slopes), joint=joint, partials=partials)
    if partials is None or bias_dtype is None:
        return joint, None
    return joint, add_partials(partials, bias_dtype)[0]
