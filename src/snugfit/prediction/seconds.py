"""Seconds of a step: two workers and a queue.

The host asks for one kernel after the other and goes on at once; the device works them off in order. A kernel
begins when it has been asked for and the one before it has ended. Where the host reads a value (`.item()`) it
waits until the device has caught up. Nothing else is assumed: whether a step is bound by its host or by its
device, and where, follows from the queue. Steps run one after the other without a pause between, so the time
of a step is the time between the ends of two, when the first has had its effect.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from snugfit.prediction.kernel_seconds import KernelClock
from snugfit.prediction.rates import PRECISIONS, HostRate, Rates, rates_for
from snugfit.rehearsal.trace.trace import COPY_IN, PREPARED
from snugfit.results.step_seconds import PhaseSeconds, StepSeconds

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.rehearsal.trace.trace import Kernel, Trace

ROUNDS = 3
"""Steps that are played: the last one's length is stated."""

CAST = "aten::_to_copy"

LARGEST_SMALL_COPY = 1024 * 1024
"""Bytes that are copied from pageable memory without waiting for the device. On an H200 with CUDA 13.0
(2026-11-21) 1 MiB did not wait, and 4 MiB did."""

MODELS_OWN = frozenset({"forward", "backward"})
"""Phases whose arithmetic is the model's."""

FEW_TENSORS = 8
"""Operands that any operator may have; more are lists."""


def step_seconds(
    trace: Trace,
    gpu: Gpu,
    *,
    batch_size: int,
    rates: Rates | None = None,
    host: float = 1.0,
    workers: int = 0,
) -> StepSeconds:
    """The seconds of the trace's steady step on this GPU; `host` is how many times slower than the rates' the
    host is, `workers` how many processes make the batches. Raises `GpuError` when the GPU's rates are not
    known."""
    from snugfit.rehearsal.record.kernels import CONTRACTIONS, group_of

    rates = rates or rates_for(gpu)
    clock, pace = KernelClock(rates), rates.host.slower(host)
    kernels = prepared_by(workers, trace.kernels)
    device = [clock.seconds(kernel) for kernel in kernels]
    asked = [asking(kernel, pace) for kernel in kernels]
    lines: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    at_peak = 0.0
    for kernel, works, asks in zip(kernels, device, asked, strict=True):
        group = group_of(kernel.operator)
        line = lines[kernel.phase, group]
        line[0] += works
        line[1] += asks
        line[2] += _roofline(kernel, gpu)
        if group == CONTRACTIONS and kernel.phase in MODELS_OWN and not kernel.recomputed:
            at_peak += _arithmetic(kernel, gpu)
    phases = tuple(
        PhaseSeconds(
            phase=phase, group=group, device_seconds=works, host_seconds=asks, roofline_seconds=least
        )
        for (phase, group), (works, asks, least) in lines.items()
    )
    waits, making = all_waits(kernels, trace.waits), sum(making_seconds(kernel, pace) for kernel in kernels)
    length = max(play(device, asked, waits, pace), making)
    busy = sum(device)
    host_seconds = sum(asked) + pace.step + pace.wait * len(waits)
    return StepSeconds(
        step_seconds=length,
        samples_per_second=batch_size / length if length else 0.0,
        device_seconds=busy,
        host_seconds=host_seconds,
        phases=phases,
        bound="loading" if making == length > 0 else _bound(length, busy, phases),
        measured_rates=rates.measured,
        peak_seconds=at_peak,
    )


def play(device: Sequence[float], asked: Sequence[float], waits: Iterable[int], host: HostRate) -> float:
    """Seconds between the ends of two steady steps whose kernels take `device` and are asked for after
    `asked`; before kernel `waits[i]` the host waits for the device."""
    before = sorted(waits)
    now = free = last = 0.0
    length = 0.0
    for _ in range(ROUNDS):
        now += host.step
        place = 0
        for index, (works, asks) in enumerate(zip(device, asked, strict=True)):
            while place < len(before) and before[place] <= index:
                now = max(now, free) + host.wait
                place += 1
            now += asks
            free = max(free, now) + works
        for _ in before[place:]:
            now = max(now, free) + host.wait
        end = max(now, free)
        length, last = end - last, end
    return length


def asking(kernel: Kernel, host: HostRate) -> float:
    """Seconds until this kernel has been asked for."""
    if kernel.operator == PREPARED:
        return host.prepared
    if kernel.operator == COPY_IN and kernel.phase == "load":
        return host.copy + _making(kernel, host)
    if not kernel.operator.startswith("aten::"):
        each = host.foreign
    elif kernel.operator == CAST and (kernel.phase == "forward" or kernel.recomputed):
        each = host.cast
    elif kernel.recomputed:
        each = host.forward
    else:
        phases = {"forward": host.forward, "backward": host.backward, "load": host.forward}
        each = phases.get(kernel.phase, host.update)
    before = host.module * kernel.modules + host.view * kernel.views + host.checkpoint * kernel.checkpoints
    return each + before + host.tensor * max(0, kernel.tensors - FEW_TENSORS)


def all_waits(kernels: Sequence[Kernel], waits: Sequence[int]) -> tuple[int, ...]:
    """Where the host waits: where it reads a value, and where it copies a batch from memory that is not
    page-locked, small ones apart."""
    copied = (
        place + 1
        for place, kernel in enumerate(kernels)
        if kernel.operator == COPY_IN and kernel.nbytes // 2 > LARGEST_SMALL_COPY
    )
    return tuple(sorted((*waits, *copied)))


def prepared_by(workers: int, kernels: Sequence[Kernel]) -> Sequence[Kernel]:
    """The kernels of a step whose batches so many worker processes make; the very same for none."""
    if not workers:
        return kernels
    return tuple(
        kernel._replace(operator=PREPARED, tensors=workers)
        if kernel.operator == COPY_IN and kernel.phase == "load"
        else kernel
        for kernel in kernels
    )


def making_seconds(kernel: Kernel, host: HostRate) -> float:
    """Seconds beside the step in which worker processes make what this kernel copies; 0 for any other."""
    return _making(kernel, host) / kernel.tensors if kernel.operator == PREPARED else 0.0


def _making(kernel: Kernel, host: HostRate) -> float:
    samples = kernel.shapes[0][0] if kernel.shapes and kernel.shapes[0] else 1
    return host.sample * samples + host.byte * (kernel.nbytes // 2)


def _roofline(kernel: Kernel, gpu: Gpu) -> float:
    return max(_arithmetic(kernel, gpu), kernel.nbytes / gpu.bandwidth if gpu.bandwidth else 0.0)


def _arithmetic(kernel: Kernel, gpu: Gpu) -> float:
    """Seconds of its arithmetic at the data sheet's peak; 0 where that is not known."""
    peak = gpu.peak_dense.get(PRECISIONS.get(kernel.dtype, "fp32")) or gpu.peak_dense.get("fp32")
    return kernel.flops / peak if peak else 0.0


def _bound(length: float, busy: float, phases: Sequence[PhaseSeconds]) -> str:
    if busy < 0.85 * length:
        return "host"
    groups: dict[str, float] = defaultdict(float)
    for line in phases:
        groups[line.group] += line.device_seconds
    return max(groups, key=groups.__getitem__)
