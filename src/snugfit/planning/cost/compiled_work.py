"""The part of an uncompiled step that compilation of its layers leaves unchanged.

A compiler fuses element-wise operators, sums and norms. Matrix products, convolutions and attention remain
library calls, and nothing outside the layers changes. Their seconds bound a step with compiled layers.
Batched matrix products are excluded: the compiler may replace written-out attention by one kernel.
"""

from __future__ import annotations

from snugfit.rehearsal.trace.relative import without_layer_numbers
from snugfit.rehearsal.trace.trace import MATRIX_PRODUCTS, Kernel, Work

STAYS = MATRIX_PRODUCTS - {"aten::bmm", "aten::baddbmm", "aten::baddbmm_"}
"""Products that remain library calls."""

LIBRARIES = ("scaled_dot_product", "convolution")
"""Parts of the names of other operators that remain library calls."""


def left_by_compilers(work: Work) -> Work:
    """Return the kernels that compiled layers launch too."""
    return Work(tuple(filter(_stays, work.kernels)), ())


def is_left(operator: str) -> bool:
    """Return whether this operator remains a library call. The compiler never recomputes its outputs, so
    outputs that the backward pass reads are kept."""
    return operator in STAYS or any(name in operator for name in LIBRARIES)


def _stays(kernel: Kernel) -> bool:
    return is_left(kernel.operator) or without_layer_numbers(kernel.module) == kernel.module
