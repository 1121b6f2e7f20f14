"""The time at which the allocator reuses a block that is freed while another stream still uses it.

Code that uses a tensor of one stream in another marks it (`record_stream`). DeepSpeed does so for weights
that one stream gathers and another computes with. It also does so for gradients that it averages during the
backward pass. When such a tensor is dropped, the allocator records an event in those streams. The block is
free at the first allocation that finds these events completed (`insert_events`, `process_events` of
`CUDACachingAllocator.cpp`).

So the host's lead over the device decides which further bytes are reserved, and the times are those of the
simulated queue. From the drop on, torch no longer counts the block as allocated. It counts as requested until
it is free.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from snugfit.errors import GpuError
from snugfit.features.distributed.price.communication import interconnect_of
from snugfit.prediction.rates import rates_for
from snugfit.prediction.timeline import time_kernels
from snugfit.techniques.several_gpus import ranks_of

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.prediction.rates import Rates
    from snugfit.prediction.timeline import TimedKernel
    from snugfit.rehearsal.trace.trace import Trace
    from snugfit.techniques.setup import Setup


def late_frees(trace: Trace, gpu: Gpu | None, setup: Setup, rates: Rates | None) -> dict[int, int]:
    """Return the late frees of the trace's last step, in the form of `Frees` (`last_step.py`).

    The result is empty if the trace has none, or if no rates of the GPU are known.
    """
    if gpu is None or not trace.awaited:
        return {}
    try:
        rates = rates or rates_for(gpu, ranks_of(setup))
    except GpuError:
        return {}
    connected = interconnect_of(gpu, rates)
    return _by_moments(trace, time_kernels(trace, rates, connected, workers=setup.loader.workers))


def _by_moments(trace: Trace, timed: Sequence[TimedKernel]) -> dict[int, int]:
    ends = [kernel.start + kernel.device_seconds for kernel in timed]
    launches = [kernel.launch for kernel in timed]
    late = {}
    for event, number in enumerate(trace.events):
        awaited = trace.awaited.get(-number - 1) if number < 0 else None
        if not awaited:
            continue
        done = max(ends[kernel] for kernel in awaited)
        first = bisect.bisect_left(launches, done)  # of the kernels that are launched after that
        # Allocations before the last launch that precedes `done` find the block still in use.
        back = trace.launched[first - 1] if 0 < first < len(launches) else len(trace.events) * bool(first)
        if back > event:
            late[event] = back
    return late
