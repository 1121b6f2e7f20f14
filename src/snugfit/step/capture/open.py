"""Record a loop's steps as CUDA graphs, if they are set and there is a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snugfit.step.capture.handler import REHEARSED
from snugfit.step.capture.step import CapturedStep

if TYPE_CHECKING:
    from snugfit.step.capture.step import Loop


def capture(loop: Loop) -> CapturedStep | None:
    """Return the loop's recorded steps; None if they are not set or there is no GPU. Steps then run without
    graphs.
    """
    wish = loop.setup.capture
    if wish is None or not wish.recorded or not loop.job.trains:
        return None
    if (make_graphs := REHEARSED.get()) is not None:
        return CapturedStep(loop, make_graphs(), wish)
    if loop.device.type != "cuda":
        return None
    from snugfit.step.capture.graphs import CudaGraphs

    return CapturedStep(loop, CudaGraphs(loop.device), wish)
