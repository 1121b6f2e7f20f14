"""NVML: the driver's own figures of a GPU's memory, and the processes that use it.

Each query is for one GPU, found by its UUID, so no reading ever sums or mixes GPUs. Version 2 of the memory
query separates the driver's own reserve from the used bytes. Version 1 (drivers before R510) counts the
reserve as used, which cancels out in differences.

Every query of NVML fails on some system. Examples are a missing driver, a driver too old for version 2, WSL
without a process list, and MIG. Containers may show foreign process ids, and bytes may be None or 0. So every
query goes through `_call`. A failed one raises `NvmlUnavailable` with the reason in words. The caller
continues without the value and stores the reason. The library is a parameter, so that tests can replace it.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from snugfit.errors import SnugfitError
from snugfit.units import show_mib

MEMORY_V2 = 0x02000028
"""Version number of the struct `nvmlMemory_v2_t` from nvml.h: its size in bytes | 2 << 24."""


CLOCK_SM = 1
"""`NVML_CLOCK_SM` from nvml.h: the clock of the GPU's multiprocessors."""

TEMPERATURE_GPU = 0
"""`NVML_TEMPERATURE_GPU` from nvml.h: the temperature of the GPU's die."""

CLOCK_REASONS = {"power": 0x04 | 0x80, "heat": 0x20 | 0x40, "the hardware": 0x08, "its settings": 0x02}
"""Reasons for a reduced GPU clock in words, with their bits in `nvmlClocksEventReasons` of nvml.h. An idle
GPU is no such reason."""


class NvmlUnavailable(SnugfitError):
    """Error: NVML, or a value of it, is not available here; the message has the reason."""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The used and total memory of one GPU at one moment, in bytes."""

    total_bytes: int

    used_bytes: int
    """Bytes that processes use; with version 1 of the query, including the driver's reserve."""

    reserve_bytes: int | None
    """Bytes that the driver reserves for itself. None if only version 1 of the query works."""


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process with a context on the GPU."""

    pid: int
    """Process id as the driver reports it. In a container, no visible process may have this id."""

    bytes: int | None
    """GPU memory of the process in bytes; None if the driver does not report it."""


class Card:
    """One GPU, or one MIG device of a GPU, with its NVML handle."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle
        self._version: int | None = None
        self.uuid = str(_call(library, "nvmlDeviceGetUUID", handle))
        try:
            self.name = str(_call(library, "nvmlDeviceGetName", handle))
        except NvmlUnavailable:
            self.name = "unnamed GPU"

    def memory(self) -> DeviceMemory:
        """Return the GPU's used and total memory now. Raises `NvmlUnavailable` if NVML returns none, or
        impossible values.
        """
        if self._version != 1:
            try:
                answer = _call(self._library, "nvmlDeviceGetMemoryInfo", self._handle, version=MEMORY_V2)
                memory = _valid_memory(answer.total, answer.used, answer.reserved)
                self._version = 2
                return memory
            except (NvmlUnavailable, AttributeError) as refusal:
                if self._version == 2:  # versions 1 and 2 differ, so the first is kept
                    raise NvmlUnavailable(str(refusal)) from None
        answer = _call(self._library, "nvmlDeviceGetMemoryInfo", self._handle)
        memory = _valid_memory(answer.total, answer.used, None)
        self._version = 1
        return memory

    @property
    def counts_reserve(self) -> bool:
        """True if `used_bytes` includes the driver's reserve, as in version 1. Valid after `memory()`."""
        return self._version == 1

    def compute_processes(self) -> list[GpuProcess]:
        """Return the processes with a compute context. Raises `NvmlUnavailable` where the driver hides
        them."""
        return _processes(_call(self._library, "nvmlDeviceGetComputeRunningProcesses", self._handle))

    def graphics_processes(self) -> list[GpuProcess]:
        """Return the processes that draw on a display through this GPU; none where the driver hides them."""
        try:
            return _processes(_call(self._library, "nvmlDeviceGetGraphicsRunningProcesses", self._handle))
        except NvmlUnavailable:
            return []

    def utilization(self) -> float:
        """Return the fraction of a recent moment, of up to a second, in which a kernel ran on the GPU. Raises
        `NvmlUnavailable` where the driver does not report it.
        """
        share = getattr(_call(self._library, "nvmlDeviceGetUtilizationRates", self._handle), "gpu", None)
        if type(share) is not int or not 0 <= share <= 100:
            raise NvmlUnavailable(f"NVML reports a utilization of {share!r} %.")
        return share / 100

    def clock_mhz(self) -> int:
        """Return the SM clock now in MHz. Raises `NvmlUnavailable` where the driver does not report it."""
        return self._mhz("nvmlDeviceGetClockInfo")

    def highest_clock_mhz(self) -> int:
        """Return the highest supported SM clock in MHz. Raises `NvmlUnavailable` where the driver does not
        report it."""
        return self._mhz("nvmlDeviceGetMaxClockInfo")

    def power_watts(self) -> float | None:
        """Return the power that the GPU draws now, in watts; None where the driver does not report it."""
        milliwatts = self._or_none("nvmlDeviceGetPowerUsage")
        return None if milliwatts is None else milliwatts / 1000

    def temperature(self) -> float | None:
        """Return the GPU's temperature now in degrees Celsius; None where the driver does not report it."""
        return self._or_none("nvmlDeviceGetTemperature", TEMPERATURE_GPU)

    def _or_none(self, name: str, *arguments: int) -> float | None:
        try:
            return float(_call(self._library, name, self._handle, *arguments))
        except (NvmlUnavailable, TypeError, ValueError):
            return None

    def clock_reasons(self) -> int:
        """Return the current reasons of a lower clock as bits (`CLOCK_REASONS`). Drivers before R535 use
        another function name. Raises `NvmlUnavailable` where the driver does not report them."""
        try:
            return int(_call(self._library, "nvmlDeviceGetCurrentClocksEventReasons", self._handle))
        except NvmlUnavailable:
            return int(_call(self._library, "nvmlDeviceGetCurrentClocksThrottleReasons", self._handle))

    def _mhz(self, question: str) -> int:
        mhz = _call(self._library, question, self._handle, CLOCK_SM)
        if type(mhz) is not int or mhz <= 0:
            raise NvmlUnavailable(f"NVML reports a clock of {mhz!r} MHz.")
        return mhz

    def capability(self) -> tuple[int, int] | None:
        """Return the GPU's CUDA compute capability; None where the driver does not report it."""
        try:
            major, minor = _call(self._library, "nvmlDeviceGetCudaComputeCapability", self._handle)
        except NvmlUnavailable:
            return None
        return int(major), int(minor)

    def first_mig_device(self) -> Card:
        """Return the first MIG device of a partitioned GPU (the only one that CUDA shows), else the GPU
        itself."""
        try:
            current, _ = _call(self._library, "nvmlDeviceGetMigMode", self._handle)
        except NvmlUnavailable:
            return self
        if not current:
            return self
        library = self._library
        # A GPU that is split into MIG devices may have none at some indices.
        for index in range(_call(library, "nvmlDeviceGetMaxMigDeviceCount", self._handle)):
            try:
                return Card(
                    library, _call(library, "nvmlDeviceGetMigDeviceHandleByIndex", self._handle, index)
                )
            except NvmlUnavailable:
                continue
        raise NvmlUnavailable(f"{self.name} ({self.uuid}) is in MIG mode but has no MIG device.")

    def __str__(self) -> str:
        return f"{self.name} ({self.uuid})"


class Nvml:
    """An opened connection to NVML, as a context manager that closes it."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Shut NVML down. Later calls to its cards fail."""
        try:
            _call(self._library, "nvmlShutdown")
        except NvmlUnavailable:
            return

    def driver(self) -> str | None:
        """Return the driver's version; None where it is not reported."""
        try:
            return str(_call(self._library, "nvmlSystemGetDriverVersion"))
        except NvmlUnavailable:
            return None

    def cards(self) -> list[Card]:
        """Return every GPU of this machine in NVML's order, which is the order of the PCI bus."""
        count = _call(self._library, "nvmlDeviceGetCount")
        return [
            Card(self._library, _call(self._library, "nvmlDeviceGetHandleByIndex", index))
            for index in range(count)
        ]

    def card(self, uuid: str) -> Card:
        """Return the GPU or MIG device with this UUID."""
        return Card(self._library, _call(self._library, "nvmlDeviceGetHandleByUUID", uuid))


def open_nvml(library: Any | None = None) -> Nvml:
    """Return an opened NVML. Raises `NvmlUnavailable` with the reason if that fails."""
    library = library if library is not None else _binding()
    _call(library, "nvmlInit")
    return Nvml(library)


def _binding() -> Any:
    try:
        import pynvml
    except ImportError as missing:
        raise NvmlUnavailable(f"nvidia-ml-py is not installed ({missing}).") from None
    return pynvml


def _call(library: Any, question: str, *arguments: Any, **named: Any) -> Any:
    """Return the result of one call into NVML; every failure becomes `NvmlUnavailable`.

    The handler is broad on purpose. A binding raises its own errors, but also AttributeError,
    UnicodeDecodeError or OSError when driver and binding do not match.
    """
    try:
        return getattr(library, question)(*arguments, **named)
    except Exception as refusal:
        raise NvmlUnavailable(f"{question}: {refusal or type(refusal).__name__}") from None


def _valid_memory(total: Any, used: Any, reserve: Any) -> DeviceMemory:
    """Return NVML's three numbers of bytes if they are possible together. Raises
    `NvmlUnavailable` otherwise.
    """
    numbers = (total, used) if reserve is None else (total, used, reserve)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise NvmlUnavailable(f"NVML reports no memory: total {total!r}, used {used!r}, reserve {reserve!r}.")
    if total == 0 or used > total or (reserve or 0) > total:
        raise NvmlUnavailable(
            f"NVML reports impossible values: {show_mib(used)} MiB used of {show_mib(total)} MiB."
        )
    return DeviceMemory(total_bytes=total, used_bytes=used, reserve_bytes=reserve)


def _processes(answer: Any) -> list[GpuProcess]:
    processes = []
    for process in answer or ():
        used = getattr(process, "usedGpuMemory", None)
        # NVML reports an unknown size as None, 0 or the largest 64-bit number.
        is_known = type(used) is int and 0 < used < 1 << 50
        processes.append(GpuProcess(pid=int(process.pid), bytes=used if is_known else None))
    return processes
