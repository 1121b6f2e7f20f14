"""NVML: the driver's own figures of a GPU's memory, and the processes that use it.

One GPU is asked at a time, found by its UUID, so that no reading ever sums or mixes GPUs. Version 2 of the
memory query shows the driver's own reserve apart from what is used; version 1 (drivers before R510) counts
the reserve as used, which cancels out in differences.

Everything NVML may refuse is refused somewhere: no driver at all, a driver too old for version 2, WSL (no
process list), MIG, containers whose process ids are not ours, bytes that are None or 0. So every question
goes through `_ask`, and what cannot be answered raises `NvmlUnavailable` with the reason in words; whoever
asks goes on without the answer and keeps the reason. The library is a parameter, so tests bring their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from snugfit.errors import SnugfitError
from snugfit.units import show_mib

MEMORY_V2 = 0x02000028
"""`nvmlMemory_v2`: sizeof(nvmlMemory_v2_t) | 2 << 24, from nvml.h."""


CLOCK_SM = 1
"""`NVML_CLOCK_SM`, the clock of the multiprocessors, from nvml.h."""

CLOCK_REASONS = {"power": 0x04 | 0x80, "heat": 0x20 | 0x40, "the hardware": 0x08, "its settings": 0x02}
"""Why a clock is not higher, in words, with the bits of `nvmlClocksEventReasons` from nvml.h. That a GPU is
idle is none."""


class NvmlUnavailable(SnugfitError):
    """NVML, or one of its answers, is not available here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes of one GPU at one moment."""

    total_bytes: int

    used_bytes: int
    """Held by processes; under version 1 the driver's reserve too."""

    reserve_bytes: int | None
    """The driver's own reserve, or None where only version 1 answers."""


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process that holds a context on the GPU."""

    pid: int
    """As the driver numbers it: in a container this may be no process that is visible here."""

    bytes: int | None
    """What it uses; None where the driver does not report it."""


class Card:
    """One GPU, or one MIG device of a GPU, with its NVML handle."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle
        self._version: int | None = None
        self.uuid = _text(_ask(library, "nvmlDeviceGetUUID", handle))
        try:
            self.name = _text(_ask(library, "nvmlDeviceGetName", handle))
        except NvmlUnavailable:
            self.name = "unnamed GPU"

    def memory(self) -> DeviceMemory:
        """Its memory now; raises `NvmlUnavailable` for no answer, and for one that cannot be true."""
        if self._version != 1:
            try:
                answer = _ask(self._library, "nvmlDeviceGetMemoryInfo", self._handle, version=MEMORY_V2)
                memory = _valid_memory(answer.total, answer.used, answer.reserved)
                self._version = 2
                return memory
            except (NvmlUnavailable, AttributeError) as refusal:
                if self._version == 2:  # a version that answered once is kept: the two count differently
                    raise NvmlUnavailable(str(refusal)) from None
        answer = _ask(self._library, "nvmlDeviceGetMemoryInfo", self._handle)
        memory = _valid_memory(answer.total, answer.used, None)
        self._version = 1
        return memory

    @property
    def counts_reserve(self) -> bool:
        """Whether `used_bytes` holds the driver's reserve, as version 1 does. Known after `memory()`."""
        return self._version == 1

    def compute_processes(self) -> list[GpuProcess]:
        """Processes with a compute context here; raises `NvmlUnavailable` where the driver hides them."""
        return _processes(_ask(self._library, "nvmlDeviceGetComputeRunningProcesses", self._handle))

    def graphics_processes(self) -> list[GpuProcess]:
        """Processes that draw on a display through this GPU; none where the driver hides them."""
        try:
            return _processes(_ask(self._library, "nvmlDeviceGetGraphicsRunningProcesses", self._handle))
        except NvmlUnavailable:
            return []

    def utilization(self) -> float:
        """Share of the last moment (up to a second, as the driver chooses) in which a kernel ran; raises
        `NvmlUnavailable` where the driver does not report it."""
        share = getattr(_ask(self._library, "nvmlDeviceGetUtilizationRates", self._handle), "gpu", None)
        if type(share) is not int or not 0 <= share <= 100:
            raise NvmlUnavailable(f"NVML reports a utilization of {share!r} %.")
        return share / 100

    def clock_mhz(self) -> int:
        """The multiprocessors' clock now; raises `NvmlUnavailable` where the driver does not report it."""
        return self._mhz("nvmlDeviceGetClockInfo")

    def highest_clock_mhz(self) -> int:
        """The highest that it may have; raises `NvmlUnavailable` likewise."""
        return self._mhz("nvmlDeviceGetMaxClockInfo")

    def clock_reasons(self) -> int:
        """Why the clock is not higher now, as bits (`CLOCK_REASONS`); raises `NvmlUnavailable` likewise.
        Drivers before R535 know the question by another name."""
        try:
            return int(_ask(self._library, "nvmlDeviceGetCurrentClocksEventReasons", self._handle))
        except NvmlUnavailable:
            return int(_ask(self._library, "nvmlDeviceGetCurrentClocksThrottleReasons", self._handle))

    def _mhz(self, question: str) -> int:
        mhz = _ask(self._library, question, self._handle, CLOCK_SM)
        if type(mhz) is not int or mhz <= 0:
            raise NvmlUnavailable(f"NVML reports a clock of {mhz!r} MHz.")
        return mhz

    def capability(self) -> tuple[int, int] | None:
        """Its CUDA compute capability; None where the driver does not report it."""
        try:
            major, minor = _ask(self._library, "nvmlDeviceGetCudaComputeCapability", self._handle)
        except NvmlUnavailable:
            return None
        return int(major), int(minor)

    def first_mig_device(self) -> Card:
        """The first MIG device of a partitioned GPU (all that CUDA shows of it), else the GPU itself."""
        try:
            current, _ = _ask(self._library, "nvmlDeviceGetMigMode", self._handle)
        except NvmlUnavailable:
            return self
        if not current:
            return self
        library = self._library
        for index in range(_ask(library, "nvmlDeviceGetMaxMigDeviceCount", self._handle)):
            try:
                return Card(
                    library, _ask(library, "nvmlDeviceGetMigDeviceHandleByIndex", self._handle, index)
                )
            except NvmlUnavailable:
                continue
        raise NvmlUnavailable(f"{self.name} ({self.uuid}) is in MIG mode but has no MIG device.")

    def __str__(self) -> str:
        return f"{self.name} ({self.uuid})"


class Nvml:
    """An opened NVML; a context manager that closes it."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Shuts NVML down. Cards of this NVML answer no more."""
        try:
            _ask(self._library, "nvmlShutdown")
        except NvmlUnavailable:
            return

    def driver(self) -> str | None:
        """The driver's version; None where it is not reported."""
        try:
            return _text(_ask(self._library, "nvmlSystemGetDriverVersion"))
        except NvmlUnavailable:
            return None

    def cards(self) -> list[Card]:
        """Every GPU of this machine in NVML's order, which is the order of the PCI bus."""
        count = _ask(self._library, "nvmlDeviceGetCount")
        return [
            Card(self._library, _ask(self._library, "nvmlDeviceGetHandleByIndex", index))
            for index in range(count)
        ]

    def card(self, uuid: str) -> Card:
        """The GPU or MIG device with this UUID."""
        return Card(self._library, _ask(self._library, "nvmlDeviceGetHandleByUUID", uuid))


def open_nvml(library: Any | None = None) -> Nvml:
    """NVML, opened; raises `NvmlUnavailable` with the reason where there is none."""
    library = library if library is not None else _binding()
    _ask(library, "nvmlInit")
    return Nvml(library)


def _binding() -> Any:
    try:
        import pynvml
    except ImportError as missing:
        raise NvmlUnavailable(f"nvidia-ml-py is not installed ({missing}).") from None
    return pynvml


def _ask(library: Any, question: str, *arguments: Any, **named: Any) -> Any:
    """The answer to one call into NVML. Broad on purpose: a binding in front of a foreign driver raises its
    own errors, but also AttributeError, UnicodeDecodeError or OSError when driver and binding do not
    match."""
    try:
        return getattr(library, question)(*arguments, **named)
    except Exception as refusal:
        raise NvmlUnavailable(f"{question}: {refusal or type(refusal).__name__}") from None


def _valid_memory(total: Any, used: Any, reserve: Any) -> DeviceMemory:
    """The three numbers of bytes, when they can be true together; raises `NvmlUnavailable` otherwise."""
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
        is_known = type(used) is int and 0 < used < 1 << 50
        processes.append(GpuProcess(pid=int(process.pid), bytes=used if is_known else None))
    return processes


def _text(answer: Any) -> str:
    """The answer as text; older bindings return bytes."""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)
