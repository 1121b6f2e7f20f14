"""From a GPU of the table to what a prediction needs of it: a policy, and the bytes of its context.

NVML counts three things for a process: what the allocator reserved, the CUDA context, and the libraries that
were loaded into it. The last two are measured per GPU; where nobody measured, the middle of the measured ones
is taken, and the prediction says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from snugfit.errors import GpuError
from snugfit.units import MIB, show_mib

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.prediction.profile import Software
    from snugfit.rehearsal.device.policy import CudaPolicy
    from snugfit.rehearsal.trace.trace import Trace

USUAL_CONTEXT = 600 * MIB
"""Context where none was measured: the figures in the GPU table for torch 2.x lie between 426 and 621 MiB."""

CONTEXT_ERROR = 200 * MIB
"""By how much such a context may be off."""

USUAL_LIBRARIES, USUAL_BACKWARD, USUAL_CUDNN = 63 * MIB, 64 * MIB, 16 * MIB
"""Bytes that loading kernels and libraries adds, where it was not measured: an H200's figures."""

THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
"""Resident threads of a multiprocessor where they are not 2048: CUDA C++ Programming Guide, table of
technical specifications per compute capability."""


def policy_for(gpu: Gpu | None, software: Software) -> CudaPolicy:
    """How CUDA decides on this GPU, or on an H200 when none is named. Raises `GpuError` for GPUs without
    CUDA."""
    from snugfit.rehearsal.device.policy import CudaPolicy

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


def common_policy(gpus: Sequence[Gpu | None], software: Software) -> CudaPolicy:
    """That of the first of these GPUs, with one peer for each way in which others may decide that share a
    search with it."""
    policies = [policy_for(gpu, software) for gpu in gpus]
    by_decisions = {
        policy.decisions: policy for policy in policies if policy.may_share == policies[0].may_share
    }
    del by_decisions[policies[0].decisions]
    return replace(policies[0], peers=tuple(by_decisions.values()))


def context_of(gpu: Gpu | None, software: Software, trace: Trace) -> tuple[int, list[str]]:
    """NVML bytes of the context and its libraries, and sentences on what is uncertain about them."""
    if software.context_bytes is not None:
        return software.context_bytes, []
    context = gpu.context_bytes if gpu else None
    backward = any(mark.phase == "backward" for mark in trace.marks)
    cudnn = "cudnn" in trace.attention or any("convolution" in kernel.operator for kernel in trace.kernels)
    parts = (
        (context, USUAL_CONTEXT, True),
        (gpu.libraries_bytes if gpu else None, USUAL_LIBRARIES, True),
        (gpu.backward_bytes if gpu else None, USUAL_BACKWARD, backward),
        (gpu.cudnn_bytes if gpu else None, USUAL_CUDNN, cudnn),
    )
    total = sum(usual if known is None else known for known, usual, taken in parts if taken)
    if context is not None:
        return total, []
    name = gpu.name if gpu else "an unnamed GPU"
    return total, [
        f"The CUDA context of {name} is estimated ({show_mib(total)} MiB with its libraries, give or take "
        f"{show_mib(CONTEXT_ERROR)}); no reading is known."
    ]


def doubts_about(gpu: Gpu | None) -> list[str]:
    """Sentences on what is less certain on this GPU than on an H200, on which everything was measured."""
    if gpu is None:
        return ["No GPU was named: kernels are chosen as on compute capability 9.0. Add --gpu NAME."]
    if gpu.compute_capability == (9, 0):
        return []
    return [
        f"Workspaces of kernels were measured on compute capability 9.0 only; on {gpu.name} they may move "
        "reserved bytes by a few per cent."
    ]
