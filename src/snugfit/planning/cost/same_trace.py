"""Setups that have the same trace, and what differs between them put onto it.

Three wishes change no allocation of a step and no kernel: what products of fp32 matrices are computed in, who
makes the batches, and how the allocator takes its segments. So a plan rehearses once for all of them. The
first two change how long kernels take, which is written onto the trace here; the third is the replay's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from snugfit.errors import SnugfitError
from snugfit.prediction.seconds import with_worker_batches

if TYPE_CHECKING:
    from collections.abc import Mapping

    from snugfit.rehearsal.trace.trace import Kernel, Trace
    from snugfit.techniques.setup import Setup


def trace_under(setup: Setup, trace: Trace) -> Trace:
    """A trace that was rehearsed with plain products and loading, as it is under this Setup."""
    kernels = kernels_under(setup, trace.kernels)
    return trace if kernels is trace.kernels else replace(trace, kernels=kernels)


def with_sizes(trace: Trace, sizes: Mapping[tuple[str, int], int]) -> Trace:
    """The trace with buffers of other sizes, which are by name and bytes; those that are not in it stay."""
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
    """The same for kernels; the very same object where nothing is to be changed."""
    from snugfit.rehearsal.record.kernels import PRODUCTS, TF32

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
