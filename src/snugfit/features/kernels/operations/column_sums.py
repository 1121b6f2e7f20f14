"""Second stage of column sums over many rows: it adds the partial sums of all programs of a kernel.

The gradients of a norm's weight and of a bias are such sums. The kernel that computes their terms also
computes the first stage.
"""

from __future__ import annotations

import torch

from snugfit.features.kernels.operations.operators import define

PARTIALS = 256
"""Largest number of kernel programs that the rows are divided among (chosen: about two for each
multiprocessor of a Hopper GPU).
"""

column_sums = define("column_sums(Tensor partials, *, Tensor(a!) sums) -> ()", "column_sums")


def empty_partials(like: torch.Tensor, kinds: int, at_once: int) -> torch.Tensor:
    """Return an uninitialized tensor (K, P, columns) for K column sums by P programs of a Triton kernel.
    `like` has the rows, (..., columns). A program loads `at_once` rows at a time.
    """
    columns = like.size(-1)
    rows = like.numel() // columns
    programs = max(1, min(-(-rows // at_once), PARTIALS))
    return like.new_empty((kinds, programs, columns), dtype=torch.float32)


def add_partials(partials: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sums of partial sums (K, P, columns) over P: (K, columns) of this dtype, by one kernel."""
    # Sums in two stages are equal in every run, while atomic additions are not.
    sums = partials.new_empty((partials.size(0), partials.size(2)), dtype=dtype)
    column_sums(partials, sums=sums)
    return sums
