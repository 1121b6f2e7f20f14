"""The inputs of a prediction that depend on the GPU: the kernels that CUDA libraries choose, and the CUDA
context's bytes.

NVML counts three things for a process: the allocator's reserved bytes, the CUDA context, and the loaded
libraries. The last two are measured per GPU. On an unmeasured GPU, typical values are assumed, and the
prediction reports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Self

from snugfit.errors import GpuError
from snugfit.prediction.pinned import pinned_bytes
from snugfit.prediction.profile import INSTALLED
from snugfit.rehearsal.trace.trace import COPY_OUT
from snugfit.techniques.registry import hooks
from snugfit.units import GIB, MIB, show_mib
from snugfit.versions import version_of

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.prediction.profile import Software
    from snugfit.rehearsal.device.policy import CudaPolicy
    from snugfit.rehearsal.trace.trace import Kernel, Trace

USUAL_CONTEXT = 600 * MIB
"""Assumed bytes of the CUDA context on an unmeasured GPU. On the measured GPUs it has between 426 and 621 MiB
with torch 2.x.
"""

CONTEXT_ERROR = 200 * MIB
"""Possible error of `USUAL_CONTEXT` in bytes."""

USUAL_LIBRARIES, USUAL_BACKWARD, USUAL_CUDNN = 63 * MIB, 64 * MIB, 16 * MIB
"""Assumed bytes that libraries, the backward pass and cuDNN add to the context on an unmeasured GPU. The
values are those of an H200.
"""

THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
"""Number of threads that a multiprocessor can have resident, by compute capability, if it is not 2048. The
source is the CUDA C++ Programming Guide, table of technical specifications.
"""

SOLVER = 98 * MIB
"""GPU bytes (as NVML counts) of cuSOLVER, which decomposes matrices (`torch.linalg.svd`). The source is two
runs with GaLore on one H100 (results/h100-2026-11-25).
"""

LINK_STREAM = 70 * MIB
"""GPU bytes (as NVML counts) of the first stream in addition to torch's own, measured on one H200
(2026-11-23).
"""

MAPPED_GIB, ALREADY_PINNED = 2 * MIB, GIB // 8
"""GPU bytes (as NVML counts) for each GiB of page-locked host memory, and page-locked bytes that exist before
those of activations.

Each host page of 4 KiB takes 8 bytes on the GPU. Six runs on one H200 with 2 to 145 slabs of 128 MiB are
predicted to the byte with these figures (results/h200-2026-11-23/activation-offload).
"""

OLDEST_CAPABILITIES = {(2, 0): ((3, 7), (3, 7)), (2, 8): ((5, 0), (7, 0)), (2, 11): ((5, 0), (7, 5))}
"""Lowest compute capabilities of any build of torch, and of its default build, by the first release that has
them.

The source is `PyTorch CUDA Support Matrix` in pytorch's RELEASE.md. torch 2.7 was the last release with a
build for CUDA 11.8, which supports Kepler. Builds for CUDA 12.6 support Maxwell, Pascal and Volta up to torch
2.14.
"""


def policy_for(gpu: Gpu | None, software: Software) -> CudaPolicy:
    """Return the choices of CUDA's libraries (such as the attention kernel) to simulate for this GPU. `gpu`
    None means an H200.

    Raises `GpuError` for GPUs without CUDA, and for those on which the installed torch does not run.
    """
    from snugfit.rehearsal.device.policy import CudaPolicy

    # Without a GPU, kernels are those of an H200: the defaults of `CudaPolicy`.
    if gpu is None:
        return CudaPolicy(softmax_saves_input=software.softmax_saves_input)
    if gpu.compute_capability is None or gpu.sm_count is None:
        raise GpuError(
            f"{gpu.name} is not a CUDA GPU. Its memory is in the table, but snugfit predicts CUDA GPUs "
            f"only. {_OTHER_GPU_ADVICE}"
        )
    oldest, _ = _oldest_capabilities()
    # GPUs that the installed torch no longer supports may run earlier software.
    if software.name == INSTALLED and gpu.compute_capability < oldest:
        raise GpuError(
            f"The installed torch {_torch()} does not run on {gpu.name}: compute capability "
            f"{_text(gpu.compute_capability)}, but its builds start at {_text(oldest)}. {_OTHER_GPU_ADVICE}"
        )
    return CudaPolicy(
        capability=gpu.compute_capability,
        multiprocessors=gpu.sm_count,
        threads_per_multiprocessor=THREADS.get(gpu.compute_capability, 2048),
        cache_bytes=gpu.l2_cache_bytes or CudaPolicy.cache_bytes,
        softmax_saves_input=software.softmax_saves_input,
        free_bytes=_free_bytes(gpu),
    )


def _free_bytes(gpu: Gpu) -> int | None:
    """Return the bytes that are free on the GPU after a process has created its context; None if unknown."""
    if gpu.memory_bytes is None:
        return None
    return gpu.memory_bytes - (gpu.context_bytes or USUAL_CONTEXT)


_OTHER_GPU_ADVICE = "Try a current CUDA GPU. For a rough answer, try snugfit predict --memory with its size."


def _torch() -> str:
    """Return the installed release of torch, such as `2.13`."""
    return ".".join((version_of("torch") or "2.0").split(".")[:2])


def _oldest_capabilities() -> tuple[tuple[int, int], tuple[int, int]]:
    """Return two lowest compute capabilities for the installed torch: that of any of its builds, and that of
    the default build.
    """
    major, minor = map(int, _torch().split("."))
    return OLDEST_CAPABILITIES[max(first for first in OLDEST_CAPABILITIES if first <= (major, minor))]


def _text(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def common_policy(gpus: Sequence[Gpu | None], software: Software) -> CudaPolicy:
    """Return the policy (the kernel choices of CUDA's libraries) with which one simulation serves all of
    these GPUs.

    It is that of the first GPU. Its `peers` are the policies of GPUs with other choices.
    """
    policies = [policy_for(gpu, software) for gpu in gpus]
    # GPUs with equal kernel choices need one simulation, so one policy of each kind suffices.
    by_decisions = {
        policy.decisions: policy for policy in policies if policy.sharing_key == policies[0].sharing_key
    }
    del by_decisions[policies[0].decisions]
    return replace(policies[0], peers=tuple(by_decisions.values()))


GRAPHS, GRAPH, NODES_OF_A_GRAPH = 60 * MIB, 4 * MIB, 1_500
"""GPU bytes (as NVML counts) of CUDA graphs: once per process, and for every `NODES_OF_A_GRAPH` kernels of a
graph.

Eleven runs on an H200 and an H100 with torch 2.11 are all predicted exactly. They had three to six graphs of
3 to 2,376 kernels each (2026-11-27, results/h200-2026-11-27/captured.json).
"""


class ContextNeeds(NamedTuple):
    """Properties of a step that enlarge the CUDA context: loaded libraries, streams, memory. They are the
    same on every GPU.
    """

    backward: bool
    """True if the step has a backward pass."""
    cudnn: bool
    """True if the step loads cuDNN."""
    pinned_bytes: int
    """Bytes of page-locked host memory."""
    streams: int
    """Number of CUDA streams in addition to torch's own."""
    solver: bool = False
    """True if the step loads cuSOLVER."""
    feature_bytes: int = 0
    """GPU bytes (as NVML counts) that libraries of optional features add."""
    graphs_bytes: int = 0
    """GPU bytes that the driver takes for CUDA graphs."""

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """Return the properties of this trace's step that enlarge the CUDA context, such as cuDNN or CUDA
        graphs."""
        operators = {kernel.operator for kernel in trace.kernels}
        return cls(
            any(mark.phase == "backward" for mark in trace.marks),
            "cudnn" in trace.attention or any("convolution" in operator for operator in operators),
            pinned_bytes(trace.kernels),
            int(COPY_OUT in operators),
            any(block.operator.startswith("aten::_linalg_svd") for block in trace.blocks),
            sum(added(operators) for added in hooks("context_bytes")),
            graphs_bytes(trace.kernels),
        )


def graphs_bytes(kernels: Iterable[Kernel]) -> int:
    """Return the driver's bytes for a step's CUDA graphs, without those of compiled layers (`torch.compile`).

    Among the forward and backward passes of many micro-batches only the first two are different graphs.
    """
    played: dict[str, list[int]] = {}
    for kernel in kernels:
        if not kernel.played or kernel.compiled:
            continue
        graphs = played.setdefault(kernel.phase, [])
        # A kernel with `programs` is the first of a graph.
        if kernel.programs or not graphs:
            graphs.append(0)
        graphs[-1] += 1
    sizes = [nodes for graphs in played.values() for nodes in graphs[:2]]
    return GRAPHS * bool(sizes) + sum(GRAPH * -(-nodes // NODES_OF_A_GRAPH) for nodes in sizes)


def context_of(gpu: Gpu | None, software: Software, trace: Trace, *, group: int = 0) -> tuple[int, list[str]]:
    """Return the NVML bytes of the CUDA context and its libraries for this trace's step, and warnings about
    their accuracy.

    `group` are the bytes of the process group, which are included.
    """
    return context_for(gpu, software, ContextNeeds.of(trace), group=group)


def context_for(
    gpu: Gpu | None, software: Software, needs: ContextNeeds, *, group: int = 0
) -> tuple[int, list[str]]:
    """Return the NVML bytes of a CUDA context on this GPU for a step with these properties (`needs`), and
    warnings about their accuracy. `group` are the bytes of the process group, which are included.
    """
    # Profiles of earlier software have one figure for context and libraries.
    if software.context_bytes is not None:
        return software.context_bytes + group, []
    context = gpu.context_bytes if gpu else None
    parts = (
        (context, USUAL_CONTEXT, True),
        (gpu.libraries_bytes if gpu else None, USUAL_LIBRARIES, True),
        (gpu.backward_bytes if gpu else None, USUAL_BACKWARD, needs.backward),
        (gpu.cudnn_bytes if gpu else None, USUAL_CUDNN, needs.cudnn),
    )
    total = group + sum(usual if known is None else known for known, usual, taken in parts if taken)
    total += SOLVER * needs.solver + needs.feature_bytes + needs.graphs_bytes
    if needs.pinned_bytes:
        # A step without page-locked memory has no CUDA stream for copies either.
        total += LINK_STREAM * needs.streams + MAPPED_GIB * ((needs.pinned_bytes + ALREADY_PINNED) // GIB)
    if context is not None:
        return total, []
    name = gpu.name if gpu else "an unnamed GPU"
    return total, [
        f"The CUDA context of {name} is estimated ({show_mib(total)} MiB with its libraries, plus or minus "
        f"{show_mib(CONTEXT_ERROR)}); it was not measured. The default headroom covers that."
    ]


def doubts_about(gpu: Gpu | None, software: Software | None = None) -> list[str]:
    """Return warnings about predicted bytes that are less certain on this GPU than on an H200, the most
    measured GPU.

    One of them is for a GPU on which torch's default build does not run. `software` None means the installed
    packages.
    """
    if gpu is None:
        return ["No GPU was named, so kernels are chosen for compute capability 9.0. Add --gpu NAME."]
    # An H200's compute capability is the reference, so nothing is less certain.
    if gpu.compute_capability is None or gpu.compute_capability == (9, 0):
        return []
    usual = _oldest_capabilities()[1]
    older = gpu.compute_capability < usual and (software is None or software.name == INSTALLED)
    build = (
        f"The usual build of torch {_torch()} begins at compute capability {_text(usual)}; {gpu.name} has "
        f"{_text(gpu.compute_capability)} and needs the build for CUDA 12.6."
    )
    return [
        *([build] if older else []),
        f"Workspaces of kernels were measured only on compute capability 9.0. On {gpu.name} the reserved "
        "bytes may differ by a few per cent. Leave that much free (--headroom).",
    ]
