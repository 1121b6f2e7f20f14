"""Bytes of a step in host memory: offloaded activations, optimizer states, and CUDA managed memory.

Pages of managed memory are on the host or the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from snugfit.rehearsal.trace.trace import (
    COPY_OUT,
    HELD_ON_HOST,
    PINNED_ON_HOST,
    PREFETCH,
    STAGE_OUT,
    UPDATE_ON_HOST,
)
from snugfit.step.host_link import STAGED_BYTES, Slabs, managed_on_gpu

if TYPE_CHECKING:
    from snugfit.rehearsal.trace.trace import Kernel

PINNING = frozenset({COPY_OUT, STAGE_OUT, PINNED_ON_HOST})
"""Names of trace entries that occur only in steps with page-locked host memory for offloading."""

STAGING_BYTES = 2 * STAGED_BYTES
"""Bytes of the page-locked buffers through which the host updates weights: one for weights, one for
gradients.
"""


def waiting_bytes(kernels: Iterable[Kernel]) -> int:
    """Return the page-locked host bytes for offloaded activations in a step with these kernels. Each
    micro-batch's activations are copied to the host in its forward pass. All of their memory is free again
    when the next micro-batch begins.
    """
    slabs, taken = Slabs(), 0
    for kernel in kernels:
        if kernel.operator == COPY_OUT:
            # The bytes of a copy are counted as read and written.
            slabs.take(kernel.nbytes // 2)
            taken += 1
        # At the first kernel after the forward pass, slots are free for the next micro-batch.
        elif kernel.phase != "forward":
            for _ in range(taken):
                slabs.give_back()
            taken = 0
    return sum(slabs.sizes)


def pinned_bytes(kernels: Iterable[Kernel]) -> int:
    """Return the page-locked host bytes of a step with these kernels, without those of its data loader."""
    kernels = tuple(kernels)
    if PINNING.isdisjoint({kernel.operator for kernel in kernels}):
        return 0
    # A step that reports its page-locked memory has counted all of it.
    if recorded := _most(kernels, PINNED_ON_HOST):
        return recorded
    staged = any(kernel.operator == STAGE_OUT for kernel in kernels)
    return waiting_bytes(kernels) + STAGING_BYTES * staged


def host_state_bytes(kernels: Iterable[Kernel]) -> int:
    """Return the pageable host bytes of weights that the host updates, and of their states.

    They are the bytes that the step reports. Without a report, they are two moments of the weight's dtype for
    each weight.
    """
    kernels = tuple(kernels)
    if recorded := _most(kernels, HELD_ON_HOST):
        return recorded - pinned_bytes(kernels)
    # AdamW has two moments of the weight's dtype, and `nbytes` is twice the weight's bytes.
    return sum(kernel.nbytes for kernel in kernels if kernel.operator == UPDATE_ON_HOST)


def managed_bytes(kernels: Iterable[Kernel]) -> int:
    """Return the NVML bytes of paged optimizer states while all of them are on the GPU.

    Their size is that of the pages that an update prefetches.
    """
    return managed_on_gpu(sum(kernel.nbytes // 2 for kernel in kernels if kernel.operator == PREFETCH))


def _most(kernels: Iterable[Kernel], operator: str) -> int:
    return max((kernel.nbytes // 2 for kernel in kernels if kernel.operator == operator), default=0)
