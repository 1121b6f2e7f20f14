"""Warm process for forks that train with DeepSpeed's engine: it has imported DeepSpeed too."""

from __future__ import annotations

import contextlib
import functools
import sys

import many_ranks


def warm() -> None:
    """Import the dependencies of the forks."""
    many_ranks.warm()
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed
        import deepspeed.ops.adam
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
        from deepspeed.utils import numa
    numa.get_numa_cores = functools.cache(numa.get_numa_cores)  # otherwise each gradient starts `numactl`
