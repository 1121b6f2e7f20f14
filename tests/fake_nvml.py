"""Fake `pynvml` module that reports invented GPUs of a machine.

Readings may be scripted: `script` holds the used bytes of successive memory queries; the last one repeats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from snugfit.units import MIB

H200_TOTAL, H200_RESERVE = 143771 * MIB, 615 * MIB


class NvmlError(Exception):
    """Error with the interface of pynvml's."""


@dataclass
class FakeGpu:
    uuid: str = "GPU-11111111-aaaa-bbbb-cccc-000000000000"
    name: str = "NVIDIA H200"
    total: Any = H200_TOTAL
    reserve: Any = H200_RESERVE
    used: Any = 3 * MIB
    script: list[int] = field(default_factory=list)
    processes: list[tuple[int, int | None]] | None = field(default_factory=list)
    """(pid, bytes); None: the driver refuses the list, as under WSL."""
    drawers: list[tuple[int, int | None]] = field(default_factory=list)
    parts: list[FakeGpu] | None = None
    """MIG parts; None: the GPU is not in MIG mode."""
    utilization: int | None = None
    """Utilisation in per cent; None: not reported."""
    clocks: list[int] | None = None
    """MHz of successive queries; the last one repeats; None: not reported."""
    clock_reasons: int = 0
    lost: bool = False
    """True: every query fails."""

    def now(self) -> Any:
        if self.script:
            self.used = self.script.pop(0)
        return self.used


class FakeNvml:
    """The functions of pynvml that snugfit calls."""

    def __init__(self, *gpus: FakeGpu, version_two: bool = True, absent: bool = False) -> None:
        self.gpus, self.version_two, self.absent = gpus, version_two, absent
        self.open = 0
        self.before_reading: Callable[[], None] = lambda: None

    def nvmlInit(self) -> None:
        if self.absent:
            raise NvmlError("NVML Shared Library Not Found")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159.04"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        every = [*self.gpus, *(part for gpu in self.gpus for part in gpu.parts or ())]
        for gpu in every:
            if gpu.uuid == uuid:
                return gpu
        raise NvmlError("Not Found")

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> SimpleNamespace:
        if gpu.utilization is None:
            raise NvmlError("Not Supported")
        return SimpleNamespace(gpu=gpu.utilization)

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        if gpu.clocks is None:
            raise NvmlError("Not Supported")
        return gpu.clocks.pop(0) if len(gpu.clocks) > 1 else gpu.clocks[0]

    def nvmlDeviceGetMaxClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        return 1980

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: FakeGpu) -> int:
        return gpu.clock_reasons

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return gpu.name

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu, version: int | None = None) -> SimpleNamespace:
        if gpu.lost:
            raise NvmlError("GPU is lost")
        if version and not self.version_two:
            raise NvmlError("Function Not Found")
        self.before_reading()
        used = gpu.now()
        if version:
            return SimpleNamespace(total=gpu.total, used=used, reserved=gpu.reserve)
        return SimpleNamespace(total=gpu.total, used=used + gpu.reserve)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[SimpleNamespace]:
        if gpu.processes is None:
            raise NvmlError("Not Supported")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.processes]

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu: FakeGpu) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.drawers]

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        if gpu.name == "Tesla T4":
            raise NvmlError("Not Supported")
        return [int(gpu.parts is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeGpu:
        if index >= len(gpu.parts or ()):
            raise NvmlError("Not Found")
        return (gpu.parts or [])[index]

    def nvmlDeviceGetCudaComputeCapability(self, gpu: FakeGpu) -> tuple[int, int]:
        return 9, 0
