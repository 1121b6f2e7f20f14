"""Advice for a watched run, limited to conclusions that its readings support.

Three readings decide:

- the share of the GPU's memory in use at the peak;
- the share of the time in which a kernel ran, NVML's utilization (a small kernel counts as much as any);
- where that share is low, the share of the time in which the watched thread computed.

Readings from outside cannot identify the slow line of the training loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from snugfit.measurement.watched_gpu import WatchedGpu
from snugfit.units import GIB, show_bytes

NEARLY_FULL = 0.95
"""Share of the GPU's memory above which a longer batch may not fit. A choice."""

HALF_EMPTY = 0.5
"""Share of the GPU's memory below which a larger batch fits. A choice."""

IDLE = 0.8
"""Share of the time with running kernels below which the GPU counts as idle. A choice."""

BUSY, WAITING = 0.7, 0.4
"""Shares of the time in which the thread computed. Above `BUSY` the thread delays the GPU; below `WAITING` it
waits too. Between them the readings do not decide. Choices."""

FRAGMENTED, FRAGMENTED_BYTES = 0.15, GIB
"""Limits for reserved and unallocated memory, as a share of reserved bytes and in bytes. Above both, advice
mentions it."""


def advice_on(gpus: Sequence[WatchedGpu], thread_share: float | None) -> Iterator[str]:
    """Yield a sentence for each reading that calls for a change, then the limits of the readings."""
    is_advised = False
    for gpu in gpus:
        name = f"GPU {gpu.index}: " if len(gpus) > 1 else ""
        for sentence in (*_about_memory(gpu), *_about_time(gpu, thread_share)):
            is_advised = True
            yield name + sentence
    if not gpus:
        yield "No GPU was watched, so there is no advice. `snugfit predict MODEL --gpu NAME` needs no GPU."
        return
    if not is_advised:
        yield "These readings call for no change."
    yield (
        "Not known from outside: which part of a step takes the time. `snugfit measure` and "
        "`snugfit predict --gpu NAME` show it for a job."
    )


def _about_memory(gpu: WatchedGpu) -> Iterator[str]:
    used = gpu.nvml_bytes if gpu.nvml_bytes is not None else gpu.reserved_bytes
    room = (gpu.total_bytes or 0) - (gpu.reserve_bytes or 0)
    plan = f'`snugfit plan MODEL --gpu "{gpu.name}"`' if gpu.name else "`snugfit plan MODEL --gpu NAME`"
    smaller = (
        f"{plan} finds recipes that take less; snugfit.fit and snugfit.accelerate continue with one when "
        "memory runs out."
    )
    if gpu.retries:
        yield (
            f"Memory was too tight: {gpu.retries} times the allocator had to release its cache, which costs "
            f"time. {smaller}"
        )
    elif used and room > 0 and used > NEARLY_FULL * room:
        yield f"At its peak {used / room:.0%} of the memory was used: a longer batch may not fit. {smaller}"
    unused = (gpu.reserved_bytes or 0) - (gpu.allocated_bytes or 0)
    if unused > max(FRAGMENTED_BYTES, FRAGMENTED * (gpu.reserved_bytes or 0)):
        yield (
            f"{show_bytes(unused)} were reserved and not in use at the peaks. "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True often makes that smaller (`expandable` in a "
            "recipe)."
        )
    if gpu.other_processes:
        yield (
            f"{gpu.other_processes[0].upper()}{gpu.other_processes[1:]}: their memory and their time are in "
            "these figures. End them (`nvidia-smi` shows them), or take another GPU."
        )


def _about_time(gpu: WatchedGpu, thread_share: float | None) -> Iterator[str]:
    if gpu.utilization is None:
        yield (
            "It is not known if the GPU waited: its utilization was not read"
            f"{f' ({gpu.utilization_fault})' if gpu.utilization_fault else ''}."
        )
        return
    if gpu.utilization >= IDLE:
        return
    idle = f"For {1 - gpu.utilization:.0%} of the time no kernel ran on the GPU"
    if thread_share is None:
        yield f"{idle}; why is not known."
    elif thread_share < WAITING:
        yield (
            f"{idle}, and Python waited too ({1 - thread_share:.0%} of the time): for data, a disk or a "
            "network. More loader workers may help (`dataloader_num_workers`; `workers` in a recipe)."
        )
    elif thread_share > BUSY:
        room = (gpu.total_bytes or 0) - (gpu.reserve_bytes or 0)
        used = gpu.nvml_bytes or gpu.reserved_bytes or 0
        larger = " There is memory for a larger batch." if 0 < used < HALF_EMPTY * room else ""
        yield (
            f"{idle}, while Python was busy {thread_share:.0%} of it: it launches kernels more slowly than "
            "they run, or loads data in the same process. A larger batch, `torch.compile` and a fused "
            f"optimizer launch less per sample; loader workers load elsewhere.{larger}"
        )
    else:
        yield (
            f"{idle}. Python was busy {thread_share:.0%} of it, so the cause may be the launch of kernels "
            "or the wait for data. Try loader workers first, then a larger batch."
        )
