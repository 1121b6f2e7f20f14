"""Application of Setups that share a trace to that trace.

Three wishes leave a step's allocations and kernels unchanged: the format of fp32 products, the source of
batches, and the allocator's segments. A plan rehearses once for all of them. The first two change kernel
times, which this module writes into the trace. The third only affects the replay.

Passes that are replayed as CUDA graphs have the same kernels as passes that are launched one by one. This
module marks the differences in these kernels. The host launches each graph as one, and with several
micro-batches it writes a share for each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from snugfit.errors import SnugfitError
from snugfit.prediction.seconds import with_worker_batches
from snugfit.rehearsal.trace.trace import Kernel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from snugfit.rehearsal.trace.trace import Trace
    from snugfit.techniques.setup import Setup


def trace_under(setup: Setup, trace: Trace) -> Trace:
    """Return a trace as under this Setup. It was rehearsed with plain products and loading."""
    kernels = kernels_under(setup, trace.kernels)
    return trace if kernels is trace.kernels else replace(trace, kernels=kernels)


def with_sizes(trace: Trace, sizes: Mapping[tuple[str, int], int]) -> Trace:
    """Return the trace with the buffers in `sizes` (by name and bytes) resized; all other buffers stay."""
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
    """Return the kernels as under this Setup; the same object if nothing changes."""
    from snugfit.rehearsal.record.kernels import PRODUCTS, TF32

    kernels = kernels_launched(setup, kernels)
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


def kernels_launched(setup: Setup, kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    """Return the kernels replayed as CUDA graphs if the Setup records them; otherwise the same object."""
    if setup.capture is None:
        return kernels
    return played_back(kernels, has_shares=setup.micro_batches > 1)


PASSES = ("forward", "backward")
"""Phases that are recorded as CUDA graphs."""

WRITES_SHARE = Kernel("aten::fill_", "", "load", 1, 8, ((),), "torch.float32", 1)
"""Copy of a micro-batch's loss factor to the device."""

CASTS_SHARE = Kernel("aten::_to_copy", "", "forward", 1, 6, ((),), "torch.float32", 1, played=True)
"""Cast of that factor to the loss's dtype, if this is narrower."""


def played_back(kernels: tuple[Kernel, ...], *, has_shares: bool) -> tuple[Kernel, ...]:
    """Return the kernels of passes as CUDA graphs run them: the host launches each pass as one.

    Kernels that are already replayed stay unchanged. With shares, one is written to the device per
    micro-batch.
    """
    first = next((kernel for kernel in kernels if kernel.phase in PASSES), None)
    if first is None or first.played:
        return kernels
    return tuple(_played_back(kernels, has_shares=has_shares))


def _played_back(kernels: tuple[Kernel, ...], *, has_shares: bool) -> Iterator[Kernel]:
    before, multiplies = "", False
    for kernel, following in zip(kernels, (*kernels[1:], None), strict=True):
        begins = kernel.phase != before
        if has_shares and begins and before == "load":
            yield WRITES_SHARE
        before = kernel.phase
        if kernel.phase not in PASSES:
            yield kernel
            continue
        played = kernel._replace(played=True, programs=int(begins))
        if has_shares and kernel.operator == "aten::mul" and kernel.shapes == ((),):
            is_last = kernel.phase == "forward" and following is not None and following.phase == "backward"
            if is_last and kernel.itemsize < WRITES_SHARE.itemsize:
                yield CASTS_SHARE
            if is_last or (multiplies and kernel.phase == "backward"):  # by a tensor, and not by a number
                played = played._replace(nbytes=3 * kernel.itemsize, shapes=((), ()), tensors=2)
                multiplies = is_last
        yield played
