"""The seconds of a step, from a simulated queue: a host launches kernels and a device runs them.

The host launches one kernel after the other without waiting. The device runs them in order. A kernel starts
when it has been launched and the one before it has ended. To read a value (`.item()`) the host waits until
the device has caught up.

Copies of offloaded activations run in parallel to these kernels, one after the other. A copy begins after its
launch, after the kernels before it, and after the copy before it. The device waits for a copy before a kernel
that uses it. The queue shows if a step's time is limited by the host, the device or the link between them.

Steps run one after the other without a pause. So a step's time is the time between the ends of two
consecutive steps, after the first.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import mul
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from snugfit.prediction.exchanges import GPUS_PER_HOST, StreamsRun, exchanges
from snugfit.prediction.kernel_seconds import KernelClock
from snugfit.prediction.rates import PRECISIONS, HostLaunchCosts, Rates, rates_for
from snugfit.rehearsal.trace.trace import (
    AWAIT_COPY,
    BY_HOST,
    COLLECTIVES,
    COPIES,
    COPY_IN,
    GENERATED,
    MATRIX_PRODUCTS,
    PART_OPERATORS,
    PREPARED,
    SHARD_HOOKS,
    SHARDED_OPERANDS,
    STAGED,
    SWAPPED,
    UPDATE_ON_HOST,
    WEIGHTS_APART,
    WORK_ON_HOST,
)
from snugfit.results.step_seconds import COMMUNICATION, LINK, PhaseSeconds, StepSeconds
from snugfit.step.step import PHASES

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.prediction.exchanges import GpuLink
    from snugfit.rehearsal.trace.trace import Kernel, Trace

_T = TypeVar("_T")

SIMULATED_STEPS = 3
"""Number of steps that the queue simulates. The predicted seconds are those of the last step."""

BY_LINK_OR_HOST = COPIES | STAGED | BY_HOST | COLLECTIVES
"""Operators that neither compute on the device nor move data within its memory."""

UPDATE_PASSES, HOST_BANDWIDTH = 7, {4: 90e9, 2: 63e9}
"""Bytes that AdamW on the CPU moves per byte of weights. The second value is the CPU's bytes per second, by a
weight's size in bytes.

AdamW reads and writes weights and both moments, and only reads gradients. With 8 threads on the host of one
H200 (2026-11-24), 84 to 108e9 were measured in fp32 and 64e9 in bfloat16, alone. With these figures, steps of
three models on another host are predicted within 1 %, 1 % and 12 % (`results/h200-2026-11-23/host-adamw`). In
the third, launches by the host limit the rest of the step too.
"""

DISK_BANDWIDTH = 3e9
"""Bandwidth in bytes per second of a disk with offloaded weights and states (chosen, since no disk was
measured). It is between the data sheets of NVMe disks on PCIe 3 and on PCIe 4.
"""

CAST = "aten::_to_copy"

CAST_ON_HOST = ("torch.bfloat16", "torch.float16")
"""Dtypes of inputs that are created in 32 bits and then cast on the host, since no loader creates 16-bit
data."""

LARGEST_SMALL_COPY = 1024 * 1024
"""Largest size in bytes of a copy from pageable memory after which the host does not wait for the device. On
an H200 with CUDA 13.0 (2026-11-21) 1 MiB did not wait, and 4 MiB did."""

MODELS_OWN = frozenset({"forward", "backward"})
"""Phases of training whose FLOPs count for the model FLOPs utilisation (MFU)."""

FEW_TENSORS = 8
"""Largest number of operands of an operator that does not take lists of tensors."""

COMPUTES, TRAVELS = -2, -1
"""Roles of a kernel in the simulated queue: it runs on the device, or is a copy in parallel to computation.

A role from 0 up makes the device wait for a copy. The role is the number of copies launched after that one.
"""

LINK_BOUND_ABOVE = 1.05
"""Ratio of a step's seconds to those without copies or exchanges between GPUs, above which these are its
bottleneck (chosen).
"""

PYTHON_COST_FIELDS = {
    SHARD_HOOKS: "shard_hook",
    SHARDED_OPERANDS: "sharded_operand",
    PART_OPERATORS: "part_operator",
    WEIGHTS_APART: "weight_apart",
}
"""Name of the field of `HostLaunchCosts` with the seconds of one repetition, by operator. The host repeats
these operators `Kernel.tensors` times in Python.
"""

HOST_BOUND_BELOW = 0.85
"""Share of a step's seconds in which the device computes. Below it, reports name the host as the bottleneck
(chosen).
"""


def step_seconds(
    trace: Trace,
    gpu: Gpu,
    *,
    batch_size: int,
    rates: Rates | None = None,
    workers: int = 0,
    streams: StreamsRun | None = None,
) -> StepSeconds:
    """Return the seconds of a step of this trace on this GPU.

    `workers` is the number of the DataLoader's processes. `streams` is an earlier simulation of the step in
    several CUDA streams. Raises `GpuError` when the GPU's rates are not known.
    """
    rates = rates or rates_for(gpu)
    queue = queue_of(trace, rates, exchanges().link(gpu, rates), workers=workers)
    kernels, device, launches, syncs, costs, clock = queue
    roles = queue_roles(kernels)
    # Copies run in parallel to the computation, on the link.
    on_device = [0.0 if role == TRAVELS else s for role, s in zip(roles, device, strict=True)]
    is_exchange = each_once(lambda kernel: kernel.operator in COLLECTIVES, kernels)
    exchanging = [s * exchange for exchange, s in zip(is_exchange, device, strict=True)]
    computing = [s - exchange for s, exchange in zip(on_device, exchanging, strict=True)]
    phases = _by_phase(kernels, computing, launches, gpu)
    # Workers prepare batches while a step runs, so only the seconds beyond the step's count.
    loading = sum(each_once(lambda kernel: loader_seconds(kernel, costs), kernels))
    exposed = 0.0
    if communication := sum(exchanging):
        run = exchanges().run_in_streams
        length = (streams or run(*queue[:-1])).seconds
        # The same queue without exchanges shows how much of them no computation hides.
        exposed = max(0.0, length - run(kernels, computing, launches, syncs, costs).seconds)
    else:
        length = simulate_queue(device, launches, syncs, costs, roles)
    # A step cannot be shorter than the preparation of its batches.
    length = max(length, loading)
    busy, link = sum(computing), sum(device) - sum(on_device)
    bound = "loading" if loading == length > 0 else _bottleneck(length, busy, phases)
    # Without its copies the step would be clearly shorter, so the link is its bottleneck.
    if link and length > LINK_BOUND_ABOVE * simulate_queue(on_device, launches, syncs, costs):
        bound = LINK
    if exposed and length > LINK_BOUND_ABOVE * (length - exposed):
        bound = COMMUNICATION
    return StepSeconds(
        step_seconds=length,
        samples_per_second=batch_size / length if length else 0.0,
        device_seconds=busy,
        host_seconds=sum(launches) + costs.step + costs.wait * len(syncs),
        phases=phases,
        bound=bound,
        measured_rates=rates.measured,
        rough_seconds=sum(map(mul, each_once(KernelClock(rates).is_rough, kernels), computing)),
        assumed_host=not rates.calibrated,
        peak_seconds=model_peak_seconds(kernels, gpu),
        link_seconds=link,
        communication_seconds=communication,
        exposed_communication_seconds=exposed,
        limited_mhz=rates.power.highest_mhz * clock if rates.power and clock < 1 else None,
    )


class LaunchQueue(NamedTuple):
    """The kernels of a step with their seconds on the device and to launch, as inputs of the simulated
    queue."""

    kernels: Sequence[Kernel]
    device: Sequence[float]
    launches: Sequence[float]
    syncs: Sequence[int]
    """Indices of the kernels before which the host waits for the device, for example at `.item()`."""
    host: HostLaunchCosts
    clock: float
    """Clock of the GPU as a share of its highest one: below 1 at the power limit."""


def queue_of(
    trace: Trace, rates: Rates, connected: GpuLink | None = None, *, workers: int = 0
) -> LaunchQueue:
    """Return the kernels of this trace's step with their seconds, as inputs of the simulated queue of host
    and device."""
    kernels = with_worker_batches(workers, trace.kernels)
    launches = each_once(lambda kernel: launch_seconds(kernel, rates.host), kernels)
    clock, device = at_power_limit(KernelClock(rates, connected), kernels, launches)
    return LaunchQueue(kernels, device, launches, sync_points(kernels, trace.waits), rates.host, clock)


def at_power_limit(
    clock: KernelClock, kernels: Sequence[Kernel], launches: Sequence[float]
) -> tuple[float, list[float]]:
    """Return the clock of a step of these kernels as a share of the highest one, and each kernel's seconds.

    `launches` are the seconds in which the host launches each kernel. Without `Rates.power` the clock is the
    highest.
    """
    device, power = each_once(clock.seconds, kernels), clock.rates.power
    if power is None or not device:
        return 1.0, device
    work = each_once(clock.work, kernels)
    sums = [sum(part) for part in zip(*work, strict=True)]
    share = float(power.clock(max(sum(device), sum(launches)), sums))
    longer = power.slowdown(share) - 1
    return share, [seconds + part[0] * longer for seconds, part in zip(device, work, strict=True)]


class _DistinctKernels:
    """Index of the distinct kernel objects of a trace, since equal micro-batches refer to the same
    objects.
    """

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self.kernels = kernels
        # Repeated micro-batches share their kernel objects, so each is timed once.
        unique = {id(kernel): kernel for kernel in kernels}
        numbers = {key: number for number, key in enumerate(unique)}
        self.unique = [*unique.values()]
        self.numbers = [*map(numbers.__getitem__, map(id, kernels))]


_DISTINCT_CACHE: list[_DistinctKernels] = []
"""Cache of the index of different kernels in the last tuple, since several functions process the same tuple
in turn.
"""


def each_once(value: Callable[[Kernel], _T], kernels: Sequence[Kernel]) -> list[_T]:
    """Return the value of a function for each kernel, computed only once for repeated references to one
    object.
    """
    # A list may change, so only tuples are cached.
    if type(kernels) is not tuple:
        distinct = _DistinctKernels(kernels)
    # Tuples are compared by identity, since they may be long.
    elif _DISTINCT_CACHE and _DISTINCT_CACHE[0].kernels is kernels:
        distinct = _DISTINCT_CACHE[0]
    else:
        distinct = _DistinctKernels(kernels)
        _DISTINCT_CACHE[:] = [distinct]
    values = [value(kernel) for kernel in distinct.unique]
    return [*map(values.__getitem__, distinct.numbers)]


def _by_phase(
    kernels: Sequence[Kernel], device: Sequence[float], launches: Sequence[float], gpu: Gpu
) -> tuple[PhaseSeconds, ...]:
    """Return the kernels' seconds on device and host, summed by phase and operator group (matrix products,
    ...)."""
    from snugfit.rehearsal.record.kernels import group_of

    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    lines = each_once(lambda kernel: sums[kernel.phase, group_of(kernel.operator)], kernels)
    rooflines = each_once(
        lambda kernel: 0.0 if kernel.operator in BY_LINK_OR_HOST else _roofline(kernel, gpu), kernels
    )
    for line, device_seconds, host_seconds, roofline in zip(lines, device, launches, rooflines, strict=True):
        line[0] += device_seconds
        line[1] += host_seconds
        line[2] += roofline
    return tuple(
        PhaseSeconds(
            phase=phase, group=group, device_seconds=line[0], host_seconds=line[1], roofline_seconds=line[2]
        )
        for (phase, group), line in sums.items()
    )


def model_peak_seconds(kernels: Sequence[Kernel], gpu: Gpu) -> float:
    """Return the seconds of the model's matrix products, convolutions and attention at the data sheet's peak.
    Recomputed ones are left out."""
    from snugfit.rehearsal.record.kernels import CONTRACTIONS, group_of

    def seconds(kernel: Kernel) -> float | None:
        is_own = (kernel.phase in MODELS_OWN or _is_forward(kernel)) and not kernel.recomputed
        return _arithmetic(kernel, gpu) if is_own and group_of(kernel.operator) == CONTRACTIONS else None

    return sum(
        (kernel_seconds for kernel_seconds in each_once(seconds, kernels) if kernel_seconds is not None), 0.0
    )


def queue_roles(kernels: Sequence[Kernel]) -> list[int]:
    """Return each kernel's role in the simulated queue: `COMPUTES`, or `TRAVELS` for a concurrent copy. For a
    kernel that waits for a copy, it is the number of copies launched after that one.
    """
    return each_once(
        lambda k: TRAVELS if k.operator in COPIES else k.tensors if k.operator == AWAIT_COPY else COMPUTES,
        kernels,
    )


def simulate_queue(
    device: Sequence[float],
    launches: Sequence[float],
    syncs: Iterable[int],
    host: HostLaunchCosts,
    roles: Sequence[int] = (),
) -> float:
    """Return the seconds between the ends of two consecutive steps, by simulating the queue of host and
    device.

    `device` are the seconds of each kernel on the device or the link, and `launches` those on the host. The
    host waits for the device before the kernels whose indices are in `syncs`. `roles` are those of
    `queue_roles`. Without `roles`, all kernels run on the device.
    """
    return run_queue(device, launches, syncs, host, roles)[0]


def run_queue(
    device: Sequence[float],
    launches: Sequence[float],
    syncs: Iterable[int],
    host: HostLaunchCosts,
    roles: Sequence[int] = (),
    *,
    depth: int | None = None,
) -> tuple[float, list[tuple[float, float]]]:
    """Return the seconds of `simulate_queue`, and the times at which each kernel's launch and run begin, in
    seconds since the step's beginning. The host is at most `depth` launches ahead of the device.
    """
    # Parts without a wait need no test per kernel.
    stretches = _between_syncs(zip(device, launches, roles or repeat(COMPUTES)), syncs)
    now = free = link = length = last = 0.0
    # The host is at most `depth` launches ahead, so it waits for the oldest kernel in the queue to end.
    ends = deque([0.0] * (depth or 1), maxlen=depth)  # without a depth the first stays
    moments: list[tuple[float, float]] = []
    for remaining in reversed(range(SIMULATED_STEPS)):
        begin = now
        copies: list[float] = []  # end times of this step's copies
        now += host.step
        for waits, kernels in stretches:
            # Several waits at one position cost one round trip each.
            for _ in range(waits):
                now = max(now, free) + host.wait
            for seconds, launch, role in kernels:
                if ends[0] > now:  # noqa: PLR1730 - `max` takes longer, a hundred thousand times
                    now = ends[0]
                launched = now + launch
                start = free if free > launched else launched
                if role == TRAVELS:
                    start = max(start, link)
                elif role >= 0:
                    # The role is the number of copies that were launched later, so it indexes from the end.
                    start = max(start, copies[-1 - role])
                if not remaining:
                    moments.append((now - begin, start - begin))
                now = launched
                if role == TRAVELS:
                    link = start + seconds
                    copies.append(link)
                    continue
                free = start + seconds
                ends.append(free)
        # The host may end after the device. The next step begins when both have ended.
        end = max(now, free)
        length, last = end - last, end
    return length, moments


def _between_syncs(kernels: Iterable[_T], syncs: Iterable[int]) -> list[tuple[int, list[_T]]]:
    """Split a step's kernels where the host waits for the device. Return each part with the number of waits
    before it."""
    cut = list(kernels)
    # A wait at the end of the step comes after its last kernel.
    waits = Counter(min(sync, len(cut)) for sync in syncs)
    starts = sorted({0, *waits})
    return [
        (waits[start], cut[start:end]) for start, end in zip(starts, [*starts[1:], len(cut)], strict=True)
    ]


def launch_seconds(kernel: Kernel, host: HostLaunchCosts) -> float:
    """Return the seconds that the host takes to launch this kernel, including code before it that launches no
    kernel.

    The host waits once for copies that run together. Such a wait takes as long as a launch from Python. A
    copy takes as long as a launch in the backward pass. On the host of one H200 (2026-11-24) 1, 4 and 16
    copies to the host took 35, 102 and 187 us. Copies back took 42, 75 and 222 us.
    """
    # Workers have already prepared the batch, so it is only taken from their queue.
    if kernel.operator == PREPARED:
        return host.prepared
    if kernel.operator == COPY_IN and kernel.phase == "load":
        return host.copy + _batch_seconds(kernel, host)
    launch = _own_launch(kernel, host)
    if kernel.played and not kernel.compiled:  # no module of the model is called
        return launch
    before = host.module * kernel.modules + host.view * kernel.views + host.checkpoint * kernel.checkpoints
    # Autograd calls a compiled backward program, at a separate cost.
    in_backward = kernel.phase == "backward" and not kernel.recomputed
    program = host.backward_program if in_backward else host.program
    before += host.intercepted * kernel.intercepted + program * kernel.programs
    before += host.function * kernel.functions
    # Sharded tensors have a separate cost.
    lists = 0 if kernel.operator == SHARDED_OPERANDS else max(0, kernel.tensors - FEW_TENSORS)
    return launch + before + host.tensor * lists


def _own_launch(kernel: Kernel, host: HostLaunchCosts) -> float:
    """Return the seconds in which the host launches this kernel, without code before it that launches no
    kernel."""
    if kernel.played:  # the first kernel includes the launch of the graph
        launch = host.python_launched if kernel.programs else 0.0
    elif kernel.compiled:
        launch = host.generated if kernel.operator.startswith(GENERATED) else host.in_program
    elif kernel.operator == UPDATE_ON_HOST:
        launch = UPDATE_PASSES * _own_bytes(kernel) / HOST_BANDWIDTH[kernel.itemsize]
    elif kernel.operator in PYTHON_COST_FIELDS:
        launch = getattr(host, PYTHON_COST_FIELDS[kernel.operator]) * kernel.tensors
    elif kernel.operator in BY_HOST:
        rate = DISK_BANDWIDTH if kernel.operator == SWAPPED else HOST_BANDWIDTH[4]
        # Other entries of the host have no work.
        launch = _own_bytes(kernel) / rate if kernel.operator in (WORK_ON_HOST, SWAPPED) else 0.0
    elif kernel.operator in COPIES | STAGED:
        launch = host.backward
    elif kernel.operator == AWAIT_COPY or not kernel.operator.startswith("aten::"):
        launch = host.python_launched
    elif kernel.operator == CAST and (kernel.recomputed or _is_forward(kernel)):
        launch = host.cast
    elif kernel.recomputed:
        launch = host.forward
    else:
        phases = {"backward": host.backward, "load": host.forward}
        # Most products of an optimizer copy a matrix first.
        optimizers = host.product if kernel.operator in MATRIX_PRODUCTS else host.update
        launch = host.forward if _is_forward(kernel) else phases.get(kernel.phase, optimizers)
    return launch


def _is_forward(kernel: Kernel) -> bool:
    """Return True if the kernel is of a forward pass. Its phase is `forward`, or one that a feature defines
    (such as generation)."""
    return kernel.phase == "forward" or kernel.phase not in PHASES


def _own_bytes(kernel: Kernel) -> float:
    """Return the bytes of host memory that this kernel reads or writes, times the ranks of one host that do
    so at once."""
    # Ranks of one host share its memory bandwidth.
    return kernel.nbytes / 2 * max(1, min(kernel.peers[0], GPUS_PER_HOST))


def sync_points(kernels: Sequence[Kernel], waits: Sequence[int]) -> tuple[int, ...]:
    """Return the indices of the kernels before which the host waits for the device, in order.

    It waits where it reads a value (`waits`). It also waits after it has copied a batch from memory that is
    not page-locked, unless the copy is small.
    """
    waited = each_once(
        lambda kernel: kernel.operator == COPY_IN and kernel.nbytes // 2 > LARGEST_SMALL_COPY, kernels
    )
    after_copies = (index + 1 for index, waits_after in enumerate(waited) if waits_after)
    return tuple(sorted((*waits, *after_copies)))


def with_worker_batches(workers: int, kernels: Sequence[Kernel]) -> Sequence[Kernel]:
    """Return the kernels of a step whose batches come from `workers` processes; without workers, the same
    object."""
    if not workers:
        return kernels
    return tuple(
        kernel._replace(operator=PREPARED, tensors=workers)
        # Only batches come from workers. Other copies from the host are unchanged.
        if kernel.operator == COPY_IN and kernel.phase == "load"
        else kernel
        for kernel in kernels
    )


def loader_seconds(kernel: Kernel, host: HostLaunchCosts) -> float:
    """Return the seconds in which worker processes create the batch that this kernel copies; 0 for any other
    kernel.
    """
    return _batch_seconds(kernel, host) / kernel.tensors if kernel.operator == PREPARED else 0.0


def _batch_seconds(kernel: Kernel, host: HostLaunchCosts) -> float:
    """Return the seconds in which one process reads and collates the tensor that this kernel copies.

    Inputs of 16 bits are created in 32 bits and then cast (`step/batches.py`).
    """
    samples = kernel.shapes[0][0] if kernel.shapes and kernel.shapes[0] else 1
    # A copy's bytes count as read and written.
    nbytes = kernel.nbytes // 2 * (2 if kernel.dtype in CAST_ON_HOST else 1)
    return host.sample * samples + host.byte * nbytes


def _roofline(kernel: Kernel, gpu: Gpu) -> float:
    """Return the seconds of a kernel at the data sheet's peaks: the larger of its arithmetic and its memory
    traffic."""
    return max(_arithmetic(kernel, gpu), kernel.nbytes / gpu.bandwidth if gpu.bandwidth else 0.0)


def _arithmetic(kernel: Kernel, gpu: Gpu) -> float:
    """Return the seconds of the kernel's FLOPs at the data sheet's peak; 0 if the peak is unknown."""
    peak = gpu.peak_dense.get(PRECISIONS.get(kernel.dtype, "fp32")) or gpu.peak_dense.get("fp32")
    return kernel.flops / peak if peak else 0.0


def _bottleneck(length: float, busy: float, phases: Sequence[PhaseSeconds]) -> str:
    """Return the bottleneck of a step: `host`, or the operator group with the most device seconds. `length`
    and `busy` are the step's and the device's seconds."""
    if busy < HOST_BOUND_BELOW * length:
        return "host"
    groups: dict[str, float] = defaultdict(float)
    for line in phases:
        groups[line.group] += line.device_seconds
    return max(groups, key=groups.__getitem__)
