"""Warm process for forks that train with DeepSpeed's engine: it has imported DeepSpeed too."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import many_ranks
from snugfit.features.distributed.engine import config


def warm() -> None:
    """Import the dependencies of the forks."""
    many_ranks.warm()
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed
        import deepspeed.ops.adam
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
        from deepspeed.utils import numa
    numa.get_numa_cores = functools.cache(numa.get_numa_cores)  # otherwise each gradient starts `numactl`


@contextlib.contextmanager
def few_weights_live() -> Iterator[None]:
    """Make the third stage drop a module's weights after its computation, as it does with a large model."""
    section = config.zero_section

    def sparing(wish: Any, *more: Any) -> dict[str, Any]:
        limits = {"stage3_max_live_parameters": 10_000, "stage3_max_reuse_distance": 10_000}
        return {**section(wish, *more), **limits}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "zero_section", sparing)
        yield
