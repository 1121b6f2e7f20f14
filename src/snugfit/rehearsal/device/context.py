"""When the driver lets go of what it held since it made the context: before the first kernel of most kinds.

Until then 414 MiB of the address space lie behind the process's first segment; afterwards they are a hole
that segments go to, and so the order of addresses hangs on what was allocated before (`addresses.py`).
Kernels that work in place leave no other trace on a trace. In a fresh process for each operator, with no
caching (`results/h200-2026-11-22/holes.json`), an H200's driver let go at `fill_`, `ones`, `zeros`, `cos`, a
cast and efficient attention, and neither at `KEEPING` nor at copies from the host. What was not tried is
taken for one of the former: most kernels go element by element, as they do.

The moment is a block without bytes on the trace, so that whatever repeats, lengthens or joins traces keeps
its place among the births.
"""

from __future__ import annotations

from snugfit.rehearsal.trace.trace import MATRIX_PRODUCTS

SETTLED = "context settled"
"""The operator of the block that marks the moment."""

KEEPING = MATRIX_PRODUCTS | {
    "aten::normal_",
    "aten::uniform_",
    "aten::randn",
    "aten::rand",
    "aten::arange",
    "aten::_scaled_dot_product_cudnn_attention",
}
"""Kernels at which the driver keeps what it holds."""
