"""Measurement of a block of the user's own code by `snugfit.watch`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import snugfit
from fake_nvml import H200_RESERVE, H200_TOTAL, FakeGpu, FakeNvml
from snugfit.errors import GpuError, UsageError
from snugfit.features.watch import watch as watch_room
from snugfit.features.watch.gpu import WatchedGpu
from snugfit.features.watch.result import WatchResult
from snugfit.features.watch.watch import Watch, watch
from snugfit.measurement import sampler as sampler_room
from snugfit.units import GIB, MIB

A, B = (f"GPU-{digit * 8}-aaaa-bbbb-cccc-000000000000" for digit in "12")


class FakeCuda:
    """A fake `torch.cuda` of a process that uses two GPUs."""

    def __init__(self, *, initialized: bool = True, current: int = 0) -> None:
        self.initialized, self.current = initialized, current
        self.peaks = {0: 9000 * MIB, 1: 9000 * MIB}
        self.retries = {0: 5, 1: 0}
        self.broken = False

    def is_initialized(self) -> bool:
        return self.initialized

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return self.current

    def synchronize(self, index: int) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    def reset_peak_memory_stats(self, index: int) -> None:
        self.peaks[index] = 100 * MIB

    def memory_stats(self, index: int) -> dict[str, int]:
        names = ("requested", "allocated", "reserved")
        return {f"{name}_bytes.all.peak": self.peaks[index] for name in names} | {
            "num_alloc_retries": self.retries[index]
        }

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=(A, B)[index].removeprefix("GPU-"))

    def get_device_name(self, index: int) -> str:
        return "NVIDIA H200"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(watch_room, "_cuda", lambda: fake)
    monkeypatch.setattr(watch_room, "torch_cuda", lambda: "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def machine(**first: Any) -> FakeNvml:
    return FakeNvml(FakeGpu(uuid=A, used=4000 * MIB, **first), FakeGpu(uuid=B, used=50 * MIB))


def test_without_a_gpu_time_and_host_memory_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_room, "torch_cuda", lambda: None)
    with watch(samples=8) as seen:
        assert seen.seconds is None
        assert "not ended" in str(seen)
    assert seen.seconds is not None
    assert seen.seconds >= 0
    assert seen.host_bytes is not None
    assert seen.gpus == ()
    assert "none watched: the installed torch is built without CUDA" in str(seen)
    assert "(8 samples)" in str(seen)


def test_samples_may_be_told_later() -> None:
    with watch() as seen:
        pass
    assert seen.samples_per_second is None
    seen.samples = 512
    assert seen.samples_per_second == pytest.approx(512 / (seen.seconds or 0))


@pytest.mark.parametrize("samples", [0, -1, 1.5, True, "8"])
def test_samples_that_are_none(samples: Any) -> None:
    with pytest.raises(UsageError, match="samples is"):
        watch(samples=samples)


def test_the_current_gpu_is_watched_by_its_uuid(cuda: FakeCuda) -> None:
    cuda.current = 1
    with Watch(None, None, machine()) as seen:
        pass
    (gpu,) = seen.gpus
    assert (gpu.index, gpu.uuid, gpu.nvml_bytes) == (1, B, 50 * MIB)


def test_peaks_count_from_the_beginning_of_the_block(cuda: FakeCuda) -> None:
    library = machine(processes=[(os.getpid(), 700 * MIB), (4711, 3000 * MIB)])
    with Watch(None, [0], library) as seen:
        cuda.peaks[0], cuda.retries[0] = 600 * MIB, 7
        library.gpus[0].used = 4700 * MIB
    (gpu,) = seen.gpus
    assert (gpu.requested_bytes, gpu.reserved_bytes, gpu.retries) == (600 * MIB, 600 * MIB, 2)
    assert (gpu.nvml_bytes, gpu.process_bytes) == (4700 * MIB, 700 * MIB)
    assert (gpu.total_bytes, gpu.reserve_bytes) == (H200_TOTAL, H200_RESERVE)
    assert library.open == 0
    shown = str(seen)
    assert "4.59 GiB at its peak, all processes, without the driver's 615.0 MiB" in shown
    assert "this process  700.0 MiB" in shown


def full(**facts: Any) -> WatchedGpu:
    return WatchedGpu(index=0, name="NVIDIA H200", total_bytes=100 * GIB, utilization=0.99, **facts)


@pytest.mark.parametrize(
    ("gpu", "thread_share", "says"),
    [
        (full(nvml_bytes=98 * GIB), 0.9, ["98% of the memory", 'snugfit plan MODEL --gpu "NVIDIA H200"']),
        (full(nvml_bytes=98 * GIB, retries=3), 0.9, ["3 times the allocator", "snugfit plan"]),
        (full(reserved_bytes=60 * GIB, allocated_bytes=40 * GIB), 0.9, ["20.00 GiB were", "expandable"]),
        (full(other_processes="during the run process 17 used this GPU"), 0.9, ["During", "nvidia-smi"]),
        (
            replace(full(nvml_bytes=9 * GIB), utilization=0.3),
            0.95,
            ["70%", "larger batch", "There is memory"],
        ),
        (replace(full(nvml_bytes=60 * GIB), utilization=0.3), 0.1, ["70%", "Python waited", "workers"]),
        (replace(full(), utilization=0.3), 0.5, ["the launch of kernels or the wait for data"]),
        (replace(full(), utilization=0.3), None, ["the cause is not known"]),
        (replace(full(), utilization=None, utilization_fault="Not Supported"), 0.9, ["(Not Supported)"]),
        (full(nvml_bytes=60 * GIB, reserved_bytes=50 * GIB, allocated_bytes=49 * GIB), 0.9, ["no change"]),
    ],
)
def test_what_was_seen_is_answered_with_what_to_do(
    gpu: WatchedGpu, thread_share: float | None, says: list[str]
) -> None:
    seen = WatchResult()
    assert seen.advice == ()
    seen.seconds, seen.gpus, seen.thread_share = 9.0, (gpu,), thread_share
    *sentences, unknown = seen.advice
    assert len(sentences) == 1
    assert all(part in sentences[0] for part in says), sentences
    assert "Not known from outside" in unknown
    assert seen.to_json()["advice"] == [*sentences, unknown]


def test_utilization_is_read_after_the_first_second(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_room, "CENSUSES_BEFORE", 0)
    monkeypatch.setattr(sampler_room, "READINGS_PER_CENSUS", 1)
    read = threading.Event()
    library = machine(utilization=40, processes=[(os.getpid(), 700 * MIB), (4711, 3000 * MIB)])
    library.before_reading = lambda: read.set() if cuda.retries[1] else None
    with Watch(None, [0], library) as seen:
        for cuda.retries[1] in (1, 2):  # a reading after this one follows a census
            read.clear()
            assert read.wait(60)
        time.sleep(0.05)
    (gpu,) = seen.gpus
    assert gpu.utilization == pytest.approx(0.4)
    assert "process 4711 (3,000 MiB) used this GPU" in str(gpu.other_processes)
    assert "kernels ran" in str(seen)


def test_several_gpus_are_told_apart(cuda: FakeCuda) -> None:
    with Watch(None, [0, 1], machine()) as seen:
        pass
    assert [(gpu.index, gpu.uuid, gpu.nvml_bytes) for gpu in seen.gpus] == [
        (0, A, 4000 * MIB),
        (1, B, 50 * MIB),
    ]


def test_torch_that_comes_late(cuda: FakeCuda) -> None:
    """Before CUDA is initialized, CUDA_VISIBLE_DEVICES gives the GPU, and there is no peak to reset."""
    cuda.initialized = False
    with Watch(None, None, machine()) as seen:
        cuda.initialized = True
    (gpu,) = seen.gpus
    assert (gpu.uuid, gpu.requested_bytes) == (A, 9000 * MIB)


def test_without_nvml_the_allocator_is_still_seen(cuda: FakeCuda) -> None:
    with Watch(None, None, FakeNvml(absent=True)) as seen:
        pass
    (gpu,) = seen.gpus
    assert (gpu.requested_bytes, gpu.nvml_bytes, gpu.name) == (100 * MIB, None, "NVIDIA H200")
    assert "Not Found" in str(gpu.doubt)


def test_without_nvml_and_without_cuda_there_is_a_reason(cuda: FakeCuda) -> None:
    cuda.initialized = False
    with Watch(None, None, FakeNvml(absent=True)) as seen:
        pass
    assert seen.gpus == ()
    assert "Not Found" in str(seen.without_gpu)


def test_hidden_gpus_are_a_reason(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.initialized = False
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with Watch(None, None, machine()) as seen:
        pass
    assert "shows no GPU" in str(seen.without_gpu)


@pytest.mark.parametrize("gpus", [[], [-1], [True], ["0"], [2], [0, 5], 0])
def test_gpus_that_are_not_there(cuda: FakeCuda, gpus: Any) -> None:
    library = machine()
    with pytest.raises(GpuError), Watch(None, gpus, library):
        pytest.fail("the block must not run")
    assert library.open == 0


def test_a_failing_block_is_seen_and_its_error_goes_on(cuda: FakeCuda) -> None:
    library = machine()

    def fail() -> None:
        cuda.broken = True
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), Watch(None, None, library) as seen:
        fail()
    assert seen.seconds is not None
    assert "CUDA failed inside the block: CUDA error: an illegal memory access" in str(seen.gpus[0].doubt)
    assert library.open == 0


def test_what_was_seen_is_inert_in_a_notebook(cuda: FakeCuda) -> None:
    with Watch(3, None, machine(name="<script>alert(1)</script>")) as seen:
        pass
    assert "<script>" not in seen._repr_html_()
    assert "&lt;script&gt;" in seen._repr_html_()


def test_what_was_seen_is_printed_in_full_by_ipython(cuda: FakeCuda) -> None:
    with Watch(3, None, machine()) as seen:
        pass
    lines: list[str] = []
    seen._repr_pretty_(SimpleNamespace(text=lines.append), False)
    assert lines == [str(seen)]
    assert "GPU 0" in lines[0]


def test_what_was_seen_as_json(cuda: FakeCuda) -> None:
    with Watch(3, None, machine()) as seen:
        pass
    document = json.loads(json.dumps(seen.to_json(), allow_nan=False))
    assert document["what"] == "seen"
    assert document["gpus"][0]["nvml_bytes"] == 4000 * MIB


def test_the_package_has_the_function_of_the_feature() -> None:
    assert snugfit.watch is watch
    assert {"watch", "predict"} <= set(snugfit.__all__)
    assert "watch" in dir(snugfit)
    with pytest.raises(AttributeError, match="no attribute 'watched'"):
        snugfit.watched  # noqa: B018


@pytest.mark.whole
def test_watching_imports_no_torch() -> None:
    block = "import snugfit\nwith snugfit.watch(): pass"
    code = f"{block}\nimport sys; assert 'torch' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@pytest.mark.whole
@pytest.mark.parametrize("variants", [2, 3])
def test_functions_that_run_uncompiled_at_the_recompile_limit_are_named(variants: int) -> None:
    import torch
    import torch._dynamo

    torch._dynamo.reset()

    @torch.compile(backend="eager", dynamic=False)
    def add(tensor: torch.Tensor, number: str) -> torch.Tensor:
        return tensor + len(number)

    with torch._dynamo.config.patch(recompile_limit=2), watch() as seen:
        for variant in range(variants):
            add(torch.ones(2), "x" * variant)
    assert any("recompile_limit" in sentence for sentence in seen.advice) == (variants > 2)
    torch._dynamo.reset()
