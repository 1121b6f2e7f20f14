"""From a loop to its steps as CUDA graphs, where they are asked for and there is a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snugfit.step.capture.handler import REHEARSED
from snugfit.step.capture.step import CapturedStep

if TYPE_CHECKING:
    from snugfit.step.capture.step import Loop


def capture(loop: Loop) -> CapturedStep | None:
    """The loop's steps, recorded; None where that is not asked for, or where there is no GPU: steps then run
    as they are written."""
    wish = loop.setup.capture
    if wish is None or not wish.recorded or not loop.job.trains:
        return None
    if (make_graphs := REHEARSED.get()) is not None:
        return CapturedStep(loop, make_graphs(), wish)
    if loop.device.type != "cuda":
        return None
    from snugfit.step.capture.graphs import CudaGraphs

    return CapturedStep(loop, CudaGraphs(loop.device), wish)
