"""The second stage of sums over many rows: what each program of a kernel added up, together.

The first stage of a gradient of a norm's weight or of a bias is a by-product of the kernel that has its terms
at hand: each of its programs adds up its own rows, in fp32. Sums in two stages are the same in every run,
which sums by atomic additions are not.
"""

from __future__ import annotations

import torch

from snugfit.features.kernels.operations.operators import define

PARTIALS = 256
"""Programs that share the rows, at most (chosen: some two for each multiprocessor of a Hopper GPU)."""

column_sums = define("column_sums(Tensor partials, *, Tensor(a!) sums) -> ()", "column_sums")


def add_partials(partials: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sums of partials (K, P, columns) over P: (K, columns) of this dtype, by one kernel."""
    sums = partials.new_empty((partials.size(0), partials.size(2)), dtype=dtype)
    column_sums(partials, sums=sums)
    return sums
