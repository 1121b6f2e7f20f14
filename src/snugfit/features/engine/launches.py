"""Kernels of passes that are replayed as CUDA graphs.

They are those of passes that are launched one by one. This module marks the differences. The host launches
each graph as one, and with several micro-batches it writes a share for each.
"""

from __future__ import annotations

from collections.abc import Iterator

from snugfit.rehearsal.trace.trace import Kernel

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
    # Kernels of a recorded rehearsal are marked already.
    if first is None or first.played:
        return kernels
    return tuple(_played_back(kernels, has_shares=has_shares))


def _played_back(kernels: tuple[Kernel, ...], *, has_shares: bool) -> Iterator[Kernel]:
    before, multiplies = "", False
    for kernel, following in zip(kernels, (*kernels[1:], None), strict=True):
        begins = kernel.phase != before
        # A share is written before each forward pass.
        if has_shares and begins and before == "load":
            yield WRITES_SHARE
        before = kernel.phase
        if kernel.phase not in PASSES:
            yield kernel
            continue
        # The host launches a pass at its first kernel.
        played = kernel._replace(played=True, programs=int(begins))
        # A product of scalars may be that of the loss and its share.
        if has_shares and kernel.operator == "aten::mul" and kernel.shapes == ((),):
            is_last = kernel.phase == "forward" and following is not None and following.phase == "backward"
            if is_last and kernel.itemsize < WRITES_SHARE.itemsize:
                yield CASTS_SHARE
            # The factor is a tensor here, so the kernel reads one operand more.
            if is_last or (multiplies and kernel.phase == "backward"):
                played = played._replace(nbytes=3 * kernel.itemsize, shapes=((), ()), tensors=2)
                multiplies = is_last
        yield played
