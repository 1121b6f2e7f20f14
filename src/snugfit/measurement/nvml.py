"""NVML: what the device itself says about its memory and about who uses it.

NVML is asked about one GPU at a time, found by its UUID, so that no reading ever sums or mixes GPUs. Version
2 of its memory query shows the driver's own reserve apart from what is used; version 1 (drivers before R510)
counts the reserve as used, which cancels out in differences.

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


class NvmlUnavailable(SnugfitError):
    """NVML, or one of its answers, is not to be had here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes of one GPU at one moment."""

    total_bytes: int
    """The whole framebuffer."""

    used_bytes: int
    """What processes hold; under version 1 the driver's reserve too."""

    reserve_bytes: int | None
    """The driver's own reserve, or None where only version 1 answers."""


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process that holds a context on the GPU."""

    pid: int
    """As the driver numbers it: in a container this may be no process that we can see."""

    bytes: int | None
    """What it uses, where the driver tells."""


class Card:
    """One GPU, or one MIG part of a GPU, held by its NVML handle."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle
        self._version: int | None = None
        self.uuid = _text(_ask(library, "nvmlDeviceGetUUID", handle))
        try:
            self.name = _text(_ask(library, "nvmlDeviceGetName", handle))
        except NvmlUnavailable:
            self.name = "unnamed GPU"

    def memory(self) -> DeviceMemory:
        """Its memory now; raises `NvmlUnavailable` when NVML does not tell or tells nonsense."""
        if self._version != 1:
            try:
                answer = _ask(self._library, "nvmlDeviceGetMemoryInfo", self._handle, version=MEMORY_V2)
                memory = _checked(answer.total, answer.used, answer.reserved)
                self._version = 2
                return memory
            except (NvmlUnavailable, AttributeError) as refusal:
                if self._version == 2:  # a version that answered once is kept: the two count differently
                    raise NvmlUnavailable(str(refusal)) from None
        answer = _ask(self._library, "nvmlDeviceGetMemoryInfo", self._handle)
        memory = _checked(answer.total, answer.used, None)
        self._version = 1
        return memory

    @property
    def counts_reserve(self) -> bool:
        """Whether `used_bytes` holds the driver's reserve, as version 1 does. Known after `memory()`."""
        return self._version == 1

    def computing(self) -> list[GpuProcess]:
        """Processes with a compute context here; raises `NvmlUnavailable` where the driver hides them."""
        return _processes(_ask(self._library, "nvmlDeviceGetComputeRunningProcesses", self._handle))

    def drawing(self) -> list[GpuProcess]:
        """Processes that draw on a display through this GPU; none where the driver does not tell."""
        try:
            return _processes(_ask(self._library, "nvmlDeviceGetGraphicsRunningProcesses", self._handle))
        except NvmlUnavailable:
            return []

    def capability(self) -> tuple[int, int] | None:
        """Its CUDA compute capability, where the driver tells."""
        try:
            major, minor = _ask(self._library, "nvmlDeviceGetCudaComputeCapability", self._handle)
        except NvmlUnavailable:
            return None
        return int(major), int(minor)

    def first_mig_device(self) -> Card:
        """The first MIG part when the GPU is cut into parts (all that CUDA shows of it), else the GPU."""
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
        raise NvmlUnavailable(f"{self.name} ({self.uuid}) is in MIG mode and has no MIG part yet.")

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
        """Gives NVML back. Cards of this NVML answer no more."""
        try:
            _ask(self._library, "nvmlShutdown")
        except NvmlUnavailable:
            return

    def driver(self) -> str | None:
        """The driver's version, where it tells."""
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
        """The GPU or MIG part with this UUID."""
        return Card(self._library, _ask(self._library, "nvmlDeviceGetHandleByUUID", uuid))


def open_nvml(library: Any | None = None) -> Nvml:
    """NVML, opened; raises `NvmlUnavailable` with the reason where there is none."""
    used = library if library is not None else _binding()
    _ask(used, "nvmlInit")
    return Nvml(used)


def _binding() -> Any:
    try:
        import pynvml
    except ImportError as missing:
        raise NvmlUnavailable(f"nvidia-ml-py is not installed ({missing}).") from None
    return pynvml


def _ask(library: Any, question: str, *arguments: Any, **named: Any) -> Any:
    """One call into NVML. Broad on purpose: a binding in front of a foreign driver raises its own errors,
    but also AttributeError, UnicodeDecodeError or OSError when driver and binding do not match."""
    try:
        return getattr(library, question)(*arguments, **named)
    except Exception as refusal:
        raise NvmlUnavailable(f"{question}: {refusal or type(refusal).__name__}") from None


def _checked(total: Any, used: Any, reserve: Any) -> DeviceMemory:
    """The three numbers, when they can be true together."""
    numbers = (total, used) if reserve is None else (total, used, reserve)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise NvmlUnavailable(f"NVML tells no memory: total {total!r}, used {used!r}, reserve {reserve!r}.")
    if total == 0 or used > total or (reserve or 0) > total:
        raise NvmlUnavailable(
            f"NVML tells memory that cannot be: {show_mib(used)} MiB used of {show_mib(total)} MiB."
        )
    return DeviceMemory(total_bytes=total, used_bytes=used, reserve_bytes=reserve)


def _processes(answer: Any) -> list[GpuProcess]:
    found = []
    for process in answer or ():
        used = getattr(process, "usedGpuMemory", None)
        told = type(used) is int and 0 < used < 1 << 50
        found.append(GpuProcess(pid=int(process.pid), bytes=used if told else None))
    return found


def _text(answer: Any) -> str:
    """Older bindings give bytes where newer ones give text."""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)
