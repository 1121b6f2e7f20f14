"""Page-locked bytes of the host in which a step's activations wait."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from snugfit.rehearsal.trace.trace import COPY_OUT
from snugfit.step.host_link import Slabs

if TYPE_CHECKING:
    from snugfit.rehearsal.trace.trace import Kernel


def pinned_bytes(kernels: Iterable[Kernel]) -> int:
    """Of the slabs that a step with these kernels takes: each micro-batch's activations go out in its forward
    pass, and all of their places are free again when the next one begins."""
    slabs, taken = Slabs(), 0
    for kernel in kernels:
        if kernel.operator == COPY_OUT:
            slabs.take(kernel.nbytes // 2)
            taken += 1
        elif kernel.phase != "forward":
            for _ in range(taken):
                slabs.give_back()
            taken = 0
    return sum(slabs.sizes)
