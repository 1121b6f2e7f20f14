"""The ranks of a measured run (`measurement/child.py`): their process group, and the seconds of its
collectives.

**The group.** Ranks find each other by a file in the run's temporary folder (torch's `FileStore`). So no port
is needed that another process might take. GPUs exchange by NCCL, CPUs by gloo. The group is created without a
device, as in torchtitan's and most users' scripts. NCCL therefore starts with the first exchange, a sum of
one number here. Its memory and its start are no part of the first step. No rank exits before all are done,
because another rank may still read from its memory.

**The exchange.** torch's profiler needs memory of the GPU and slows the host. So it runs in a few steps after
bytes are read and steps are timed. All ranks run these steps, and the first one profiles. The profiler makes
it the last to arrive at each exchange. So its NCCL kernels show the exchange itself with little waiting for
other ranks.

- `seconds`: the sum of the seconds of NCCL's kernels.
- `exposed_seconds`: those in which an NCCL kernel runs without any other kernel, and so lengthens the step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.step.step import Observer

if TYPE_CHECKING:
    import torch

    from snugfit.step.step import Step

LEAVING = "snugfit-leaving"
"""Key of the processes' shared store that counts the ranks which have finished."""

LONGEST = timedelta(days=1)
"""Longest time that a rank waits for another one. The parent ends all ranks long before, when one dies or at
its deadline.
"""


class RankGroup:
    """The process group of a run, seen from one rank. The constructor returns once all ranks have joined."""

    def __init__(self, request: Mapping[str, Any], device: torch.device) -> None:
        import torch.distributed as dist
        from torch._C._distributed_c10d import FileStore

        self.rank, self._ranks, self._device = request["rank"], request["ranks"], device
        self._store = FileStore(request["store"], self._ranks)
        self._store.set_timeout(LONGEST)
        dist.init_process_group(
            _backend(request, device),
            store=self._store,
            rank=self.rank,
            world_size=self._ranks,
            timeout=LONGEST,
        )
        self.exchange()

    def exchange(self) -> None:
        """Sum one number over all ranks, and wait for the result."""
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1, device=self._device))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def run_further(
        self, step: Step, steps: int, timed: Observer, when_timed: Callable[[], None]
    ) -> Fabric | None:
        """Run `steps` timed steps, call the function `when_timed`, and run a few more steps. In these, the
        first rank measures the exchanges. Return their seconds, or None without NCCL kernels.
        """
        profiler = FabricProfiler() if self.rank == 0 else None
        step.run(steps + EXTRA_STEPS, FurtherSteps(timed, steps - 1, when_timed, profiler))
        return profiler.fabric() if profiler else None

    def leave(self) -> None:
        """Block until all ranks of the run have called this."""
        self._store.add(LEAVING, 1)
        while self._store.add(LEAVING, 0) < self._ranks:
            time.sleep(0.01)


def _backend(request: Mapping[str, Any], device: torch.device) -> str:
    """Return torch's backend for the device. The host needs gloo too if it holds gradients, whose norm is
    exchanged for clipping."""
    from snugfit.techniques.setup import Setup
    from snugfit.techniques.wish import processes_of

    if device.type != "cuda":
        return "gloo"
    processes = processes_of(Setup.from_json(request["setup"]))
    return "cpu:gloo,cuda:nccl" if processes is not None and processes.on_host else "nccl"


# ---- the exchange ----------------------------------------------------------------------------------------

WARM_STEPS, PROFILED_STEPS = 1, 2
"""Numbers of steps after the timed ones: steps that only start the profiler, and profiled steps."""

EXTRA_STEPS = WARM_STEPS + PROFILED_STEPS


MARKS = ("nccl:", "ProfilerStep")
"""Name prefixes of profiler annotations, which surround kernels. NCCL's kernels have names such as
`ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)`.
"""


class KernelSpan(NamedTuple):
    """Start and end time of a kernel, copy or fill on the GPU, from torch's profiler."""

    name: str
    begin: float
    end: float


class Fabric(NamedTuple):
    """Seconds of one step in which NCCL kernels ran on this GPU: in total, and without another kernel at the
    same time.
    """

    seconds: float
    exposed_seconds: float


class FabricProfiler:
    """Measures collectives by torch's profiler on a GPU, in a few steps after the timed ones. If the profiler
    fails, as under a driver that forbids it, the run continues without it.
    """

    def __init__(self) -> None:
        from torch import profiler

        self._profiler = profiler.profile(
            activities=[profiler.ProfilerActivity.CUDA],
            schedule=profiler.schedule(wait=0, warmup=WARM_STEPS, active=PROFILED_STEPS),
        )
        self._left = EXTRA_STEPS
        self._failed = False

    def begin(self) -> None:
        """Start the profiler at the end of the last timed step."""
        self._try(self._profiler.start)

    def step_ends(self) -> None:
        """End a step after the timed ones once the device has finished it; stop the profiler after the
        last."""
        import torch

        torch.cuda.synchronize()
        self._left -= 1
        self._try(self._profiler.step if self._left else self._profiler.stop)

    def fabric(self) -> Fabric | None:
        """Return the measured seconds of collectives; None if no NCCL kernel ran."""
        spans: list[KernelSpan] = []
        self._try(lambda: spans.extend(self._spans()))
        return fabric_of(spans, PROFILED_STEPS)

    def _spans(self) -> Iterator[KernelSpan]:
        for event in self._profiler.events() or ():
            if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False):
                span = event.time_range
                yield KernelSpan(event.name, span.start / 1e6, span.end / 1e6)

    def _try(self, action: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            action()
        except Exception as fault:
            self._failed = True
            print(f"The exchange between ranks was not measured: {fault}", file=sys.stderr)


class FurtherSteps(Observer):
    """Observer that forwards the events of timed steps to another observer, then calls `when_timed` and
    profiles the remaining steps.
    """

    def __init__(
        self,
        timed: Observer,
        last: int,
        when_timed: Callable[[], None],
        profiler: FabricProfiler | None,
    ) -> None:
        self._timed, self._last = timed, last
        self._when_timed, self._profiler = when_timed, profiler
        self._is_timed = True

    def step_begins(self, index: int) -> None:
        """Pass the beginning of a timed step on to the inner observer."""
        if self._is_timed:
            self._timed.step_begins(index)

    def step_ends(self, index: int) -> None:
        """Forward the end of a timed step, start the profiler after the last of them, and step the profiler
        after that."""
        if not self._is_timed:
            if self._profiler:
                self._profiler.step_ends()
            return
        self._timed.step_ends(index)
        if index == self._last:
            self._is_timed = False
            self._when_timed()
            if self._profiler:
                self._profiler.begin()

    def phase(self, name: str) -> None:
        """Pass a phase of a timed step on to the inner observer."""
        if self._is_timed:
            self._timed.phase(name)

    def build_ends(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Pass the end of the model's build on to the inner observer."""
        self._timed.build_ends(model, optimizer)


def fabric_of(spans: Iterable[KernelSpan], steps: int) -> Fabric | None:
    """Return the seconds per step of NCCL's kernels, in total and without overlap; None without such
    kernels.
    """
    exchanges: list[tuple[float, float]] = []
    computing: list[tuple[float, float]] = []
    for span in spans:
        if not span.name.startswith(MARKS):
            (exchanges if span.name.startswith("nccl") else computing).append((span.begin, span.end))
    if not exchanges:
        return None
    both = _union_length(exchanges + computing) - _union_length(computing)
    return Fabric(sum(end - begin for begin, end in exchanges) / steps, both / steps)


def _union_length(spans: Sequence[tuple[float, float]]) -> float:
    """Return the total length of the union of time spans, so that overlaps count once."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
