"""From a GPU of the table to what a prediction needs of it: a policy, and the bytes of its context.

NVML counts three things for a process: what the allocator reserved, the CUDA context, and the libraries that
were loaded into it. The last two are measured figures, per GPU where somebody measured; elsewhere the middle
of the measured ones stands in, and the prediction says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from snugfit.errors import GpuError
from snugfit.units import MIB, show_mib

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.prediction.profile import Software
    from snugfit.rehearsal.policy import CudaPolicy

USUAL_CONTEXT = 600 * MIB
"""Context where none was measured: the figures in the GPU table for torch 2.x lie between 426 and 621 MiB."""

USUAL_LIBRARIES = 138 * MIB
"""Libraries and kernels loaded while training: H200, 20 runs of seven families, 130 to 146 MiB."""

THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
"""Resident threads of a multiprocessor where they are not 2048: CUDA C++ Programming Guide, table of
technical specifications per compute capability."""


def policy_for(gpu: Gpu | None, software: Software) -> CudaPolicy:
    """How this GPU decides; without one, as an H200 does. Raises `GpuError` for GPUs without CUDA."""
    from snugfit.rehearsal.policy import CudaPolicy

    if gpu is None:
        return CudaPolicy(softmax_saves_input=software.softmax_saves_input)
    if gpu.compute_capability is None or gpu.sm_count is None:
        raise GpuError(
            f"{gpu.name} is no CUDA GPU. Its memory is in the table, but snugfit rehearses CUDA's decisions "
            "only. Try a CUDA GPU, or --memory with its size for a rough answer."
        )
    return CudaPolicy(
        capability=gpu.compute_capability,
        multiprocessors=gpu.sm_count,
        threads_per_multiprocessor=THREADS.get(gpu.compute_capability, 2048),
        softmax_saves_input=software.softmax_saves_input,
    )


def context_of(gpu: Gpu | None, software: Software) -> tuple[int, list[str]]:
    """NVML bytes besides what the allocator reserves, and doubts about them."""
    if software.context_bytes is not None:
        return software.context_bytes, []
    if gpu is not None and gpu.context_bytes is not None:
        libraries = gpu.libraries_bytes if gpu.libraries_bytes is not None else USUAL_LIBRARIES
        doubts = [] if gpu.libraries_bytes is not None else [_about_context(gpu.name, "partly estimated")]
        return gpu.context_bytes + libraries, doubts
    name = gpu.name if gpu else "an unnamed GPU"
    return USUAL_CONTEXT + USUAL_LIBRARIES, [_about_context(name, "estimated")]


def _about_context(name: str, how: str) -> str:
    usual = show_mib(USUAL_CONTEXT + USUAL_LIBRARIES)
    return f"The CUDA context of {name} is {how} (about {usual} MiB, give or take 200); no reading is known."


def doubts_about(gpu: Gpu | None) -> list[str]:
    """What is less certain on this GPU than on the one that everything was measured on."""
    if gpu is None:
        return ["No GPU was named: kernels are chosen as on compute capability 9.0. Add --gpu NAME."]
    if gpu.compute_capability == (9, 0):
        return []
    return [
        f"Workspaces of kernels were measured on compute capability 9.0 only; on {gpu.name} they may move "
        "reserved bytes by a few per cent."
    ]
