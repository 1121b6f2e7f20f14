"""Memory of a generated kernel's first launch, in which Inductor benchmarks its configurations.

Inductor flushes the GPU's cache before each launch, with a buffer of the cache's size
(`InductorBenchmarker.benchmark_gpu`). It runs the kernel on copies of the tensors that the kernel changes
(`CachingAutotuner.bench`). Copies that would not fit on the device go to the host. No benchmark runs if the
process finds the configurations in its cache on disk.

The memory is needed in the first step only, before optimizer states exist. So the lower bounds of a plan
ignore it, because they describe later steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

# A stack, because the contexts may nest.
_TIMED: list[bool] = [True]


def times_anything() -> bool:
    """Return True if this process benchmarks the configurations of the generated (Triton) kernels that it
    runs.
    """
    return _TIMED[-1]


@contextlib.contextmanager
def known_settings() -> Iterator[None]:
    """Context in which benchmarks of Triton kernel configurations are not simulated, since they run only in
    the first step.
    """
    _TIMED.append(False)
    try:
        yield
    finally:
        _TIMED.pop()
