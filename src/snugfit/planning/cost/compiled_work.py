"""The part of a step that is left where its layers are compiled, from the step that is not.

A compiler fuses what goes element by element, sums and norms. Products of matrices, convolutions and
attention stay calls of a library, and nothing outside the layers changes. So a step with compiled layers
takes no less than these take, and is lowered only where they are fast enough. Products of batches of matrices
are left out: where attention is written out in them, the compiler may find one kernel for it.
"""

from __future__ import annotations

from snugfit.rehearsal.trace.relative import without_layer_numbers
from snugfit.rehearsal.trace.trace import MATRIX_PRODUCTS, Kernel, Work

STAYS = MATRIX_PRODUCTS - {"aten::bmm", "aten::baddbmm", "aten::baddbmm_"}
"""Products that a compiler leaves to a library."""

LIBRARIES = ("scaled_dot_product", "convolution")
"""In the names of the other operators that it leaves."""


def left_by_compilers(work: Work) -> Work:
    """Of this work, what is done too where layers are compiled."""
    return Work(tuple(filter(_stays, work.kernels)), ())


def is_left(operator: str) -> bool:
    """Whether a compiler leaves this operator to a library. It computes nothing of the kind again: what was
    made so and is read by the backward pass is kept."""
    return operator in STAYS or any(name in operator for name in LIBRARIES)


def _stays(kernel: Kernel) -> bool:
    return is_left(kernel.operator) or without_layer_numbers(kernel.module) == kernel.module
