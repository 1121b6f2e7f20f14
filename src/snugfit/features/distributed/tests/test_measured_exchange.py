"""The seconds of the exchange between measured ranks, in steps after the timed ones."""

from __future__ import annotations

import time
from functools import partial
from types import SimpleNamespace

import pytest

from snugfit.features.distributed.measured_ranks import (
    Fabric,
    FurtherSteps,
    KernelSpan,
    RankGroup,
    fabric_of,
)
from snugfit.measurement import child as child_room
from snugfit.measurement.child_result import ChildResult
from snugfit.measurement.stopwatch import Stopwatch
from snugfit.step.plain_loop import PlainStep
from snugfit.step.step import Observer
from snugfit.techniques.setup import Setup
from test_measure import tiny_job


def test_exchange_is_what_runs_beside_no_other_kernel() -> None:
    """In two steps, NCCL's kernels take 3 s, of which 1.5 s overlap no other kernel."""
    spans = [
        KernelSpan("ampere_gemm", 0.0, 1.0),
        KernelSpan(
            "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0.5, 1.5
        ),  # 0.5 alone
        KernelSpan("nccl:all_gather", 0.5, 1.5),  # torch's annotation is not a kernel
        KernelSpan("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 3.0, 5.0),  # 3.0 to 3.5, 4.5 to 5.0
        KernelSpan("Memcpy DtoD (Device -> Device)", 3.5, 4.2),
        KernelSpan("vectorized_elementwise_kernel", 4.0, 4.5),
    ]
    assert fabric_of(spans, 2) == Fabric(pytest.approx(1.5), pytest.approx(0.75))
    assert fabric_of(spans[:1], 2) is None


def test_steps_after_the_timed_ones_are_not_timed() -> None:
    """The measuring process reads the peaks after the timed steps, before the profiler's steps."""
    events: list[str] = []

    class Timed(Observer):
        def step_begins(self, index: int) -> None:
            events.append(f"begins {index}")

        def step_ends(self, index: int) -> None:
            events.append(f"ends {index}")

        def phase(self, name: str) -> None:
            events.append(name)

    class Profiler:
        def begin(self) -> None:
            events.append("profiler")

        def step_ends(self) -> None:
            events.append("profiled")

    watch = FurtherSteps(Timed(), 1, lambda: events.append("peaks"), Profiler())  # type: ignore[arg-type]
    for index in range(4):
        watch.step_begins(index)
        watch.phase("forward")
        watch.step_ends(index)
    timed = ["begins 0", "forward", "ends 0", "begins 1", "forward", "ends 1"]
    assert events == [*timed, "peaks", "profiler", "profiled", "profiled"]


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_run_goes_on_for_the_profiler_and_without_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A profiler without a GPU records no communication, and a failed one reports the reason; both runs
    complete."""
    import torch

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    request = {"rank": 0, "device": "cpu", "uuid": None}

    def run() -> ChildResult:
        cpu = torch.device("cpu")
        step = PlainStep(tiny_job(), Setup(), cpu)
        group = SimpleNamespace(run_further=partial(RankGroup.run_further, SimpleNamespace(rank=0)))
        return child_room._run_with_further_steps(step, 3, Stopwatch(cpu, 1), request, group)

    seen = run()
    assert (len(seen.seconds), seen.fabric_seconds) == (2, None)
    assert seen.peaks_at is not None
    assert seen.peaks_at < time.monotonic()

    def fail(self: torch.profiler.profile) -> None:
        raise RuntimeError("CUPTI_ERROR_NOT_INITIALIZED")

    monkeypatch.setattr(torch.profiler.profile, "start", fail)
    seen = run()
    assert (len(seen.seconds), seen.fabric_seconds) == (2, None)
    assert "not measured: CUPTI_ERROR_NOT_INITIALIZED" in capfd.readouterr().err
