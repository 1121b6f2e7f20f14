"""What the first launch of a generated kernel takes: Inductor times the settings that it may run with.

It flushes the GPU's cache before each launch with a buffer of its size (`InductorBenchmarker.benchmark_gpu`),
and changes copies of what the kernel changes (`CachingAutotuner.bench`; where they would not fit beside, they
go to the host). A process whose cache on the disk knows the settings does not.

Only a first step holds this, and beside it no optimizer states yet. So what bounds a step from below, passes
and their optimizer's states together, leaves it out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from snugfit.rehearsal.device.policy import Policy

_TIMED: list[bool] = [True]


def times_anything() -> bool:
    """Whether this process has yet to time what it runs."""
    return _TIMED[-1]


def time_settings(policy: Policy, changes: Sequence[torch.Tensor]) -> None:
    """Allocates and drops what timing takes on this GPU, for a kernel that changes these tensors."""
    import torch

    nbytes = getattr(policy, "cache_bytes", 0)
    if nbytes and times_anything():
        beside = [torch.empty(nbytes, dtype=torch.uint8, device="meta")]
        beside += [torch.empty_like(one) for one in changes if one.numel() * one.itemsize <= nbytes]


@contextlib.contextmanager
def settings_known() -> Iterator[None]:
    """Within it, kernels launch as in all steps but a process's first."""
    _TIMED.append(False)
    try:
        yield
    finally:
        _TIMED.pop()
