"""Convert a recorded step to other recipes with the same allocations and kernels.

Three fields of `Setup` leave a step's allocations and kernels unchanged: the precision of fp32 products, the
data loader, and the allocator's segments. A plan simulates once for all of their values. The first two change
seconds of kernels, which this module writes into the trace. The third only affects the replay in the
allocator.

Steps with CUDA graphs mark their kernels themselves (`rehearsal/step_parts.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from snugfit.errors import SnugfitError
from snugfit.prediction.seconds import with_worker_batches
from snugfit.rehearsal.step_parts import parts_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from snugfit.rehearsal.trace.trace import Kernel, Trace
    from snugfit.techniques.setup import Setup


def trace_under(setup: Setup, trace: Trace) -> Trace:
    """Return this trace with the matrix-product precision and data loading of these training settings."""
    kernels = kernels_under(setup, trace.kernels)
    return trace if kernels is trace.kernels else replace(trace, kernels=kernels)


def with_sizes(trace: Trace, sizes: Mapping[tuple[str, int], int]) -> Trace:
    """Return the trace with other buffer sizes. `sizes` maps (operator, bytes) to the new bytes; all other
    buffers stay."""
    changed = {key: nbytes for key, nbytes in sizes.items() if nbytes != key[1]}
    if not changed:
        return trace
    return replace(
        trace,
        blocks=tuple(
            block._replace(nbytes=changed[block[1], block[0]]) if (block[1], block[0]) in changed else block
            for block in trace.blocks
        ),
    )


def kernels_under(setup: Setup, kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    """Return these kernels with the matrix-product dtypes and batch copies of these training settings."""
    from snugfit.rehearsal.record.kernels import PRODUCTS, TF32

    kernels = parts_of(setup).launched_kernels(setup, kernels)
    kernels = tuple(with_worker_batches(setup.loader.workers, kernels))
    if setup.matmul == "ieee":
        return kernels
    if setup.matmul != TF32:
        raise SnugfitError(f"a plan does not know matrix products in {setup.matmul!r}")
    is_product = [kernel.operator in PRODUCTS and kernel.dtype == "torch.float32" for kernel in kernels]
    if not any(is_product):
        return kernels
    return tuple(
        kernel._replace(dtype=TF32) if product else kernel
        for kernel, product in zip(kernels, is_product, strict=True)
    )
