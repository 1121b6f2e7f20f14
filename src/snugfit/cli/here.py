"""The GPU of this machine, for commands that take it when none is named."""

from __future__ import annotations

import os


def gpu_here(device: str | None = None) -> str | None:
    """Its name (of `cuda:1`, say, that one's), when there is one that NVML knows. Nothing touches CUDA."""
    from snugfit.measurement.target import open_target

    with open_target(device, 0, environment=os.environ) as target:
        return target.card.name if target.card else None
