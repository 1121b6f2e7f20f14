"""The measured device, found without the use of CUDA, and the environment variables of the measured process.

The parent process must not have a CUDA context on the measured GPU, so it reads only NVML and environment
variables. The measured process sees only that GPU, by its UUID. Processes that train together see all of
their GPUs, as under torchrun, and each uses the GPU of its rank. NCCL of any version can then find the links
between them. If a rank creates a context on another rank's GPU, as it would for a user, the other rank's
bytes include it. Without NVML, a GPU is used only by explicit request. The measurement then has a note that
other processes on the GPU could not be excluded.

The measured process gets the parent's environment variables without secrets, with a single visible device and
the recipe's allocator settings. A list of allowed variables would lose settings that a machine needs, such as
library paths. Only variables with the name of a secret are therefore removed: a measurement opens no socket
and needs none. Container images often disable Python's bytecode. Each measured process would then compile
torch and transformers again, so bytecode goes to the user's cache folder.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugfit.errors import GpuError
from snugfit.measurement.nvml import Card, Nvml, NvmlUnavailable, open_nvml
from snugfit.measurement.visible_devices import VISIBLE_DEVICES, card_at, hides_all, visible_cards
from snugfit.versions import torch_cuda

if TYPE_CHECKING:
    from snugfit.results.measurement import Device
    from snugfit.techniques.setup import Setup

_SECRET = re.compile(r"(?:^|_)(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:_|$)", re.IGNORECASE)


MAX_ON_CPU = 16
"""Largest number of processes that train together on the CPU (chosen), the number of GPUs of a large node."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The device that one measured process uses, with its NVML handle and its CUDA index."""

    type: str
    """Type of the torch device: `cuda` or `cpu`."""

    card: Card | None = None
    """The GPU in NVIDIA's management library (NVML); None on the CPU, and if NVML gives no data."""

    driver: str | None = None

    index: int = 0
    """Index of the GPU among this process's CUDA devices."""

    doubt: str | None = None
    """Reason why the measurement is uncertain, for a GPU that NVML does not report; None otherwise."""

    beside: tuple[str, ...] = ()
    """UUIDs of all GPUs that train together, including this one; empty for a single GPU."""

    @property
    def torch_device(self) -> str:
        """The device as the child process numbers it: `cuda:0` for a single GPU, else its position in
        `beside`. Without NVML it is the index of this process.
        """
        if self.type == "cpu":
            return "cpu"
        if self.card and self.beside:
            return f"cuda:{self.beside.index(self.card.uuid)}"
        return "cuda:0" if self.card else f"cuda:{self.index}"

    @property
    def visibility(self) -> dict[str, str]:
        """Environment variables that show the child this device only, or all devices that train together."""
        if self.type == "cpu":
            # An empty value of the variable hides all GPUs.
            return {VISIBLE_DEVICES: ""}
        if self.beside:
            return {VISIBLE_DEVICES: ",".join(self.beside)}
        return {VISIBLE_DEVICES: self.card.uuid} if self.card else {}

    def describe(self, torch_name: str | None, torch_bytes: int | None) -> Device:
        """Return the device for a measurement, with torch's name and total bytes where NVML does not
        answer."""
        from snugfit.measurement.host import cpu_name
        from snugfit.results.measurement import Device

        if self.type == "cpu":
            return Device(type="cpu", name=cpu_name())
        if self.card is None:
            return Device(type="cuda", name=torch_name or "a GPU without NVML", total_bytes=torch_bytes)
        device = Device(type="cuda", name=self.card.name, uuid=self.card.uuid, driver=self.driver)
        try:
            memory = self.card.memory()
        except NvmlUnavailable:
            return device
        return replace(device, total_bytes=memory.total_bytes, reserve_bytes=memory.reserve_bytes)


@contextmanager
def open_target(
    device: str | None, index: int, *, environment: Mapping[str, str], library: Any | None = None
) -> Iterator[Target]:
    """Yield the one device to measure on for `device`, as in `open_targets`."""
    with open_targets(device, index, 1, environment=environment, library=library) as targets:
        yield targets[0]


@contextmanager
def open_targets(
    device: str | None, index: int, count: int, *, environment: Mapping[str, str], library: Any | None = None
) -> Iterator[tuple[Target, ...]]:
    """Yield the devices to measure on for `device`: `cpu`, `cuda`, `cuda:1`, or None for GPUs if there are
    any. They are `count` GPUs in CUDA's order from that GPU on.

    NVML stays open inside. Raises `GpuError` for a GPU that was requested, or selected by
    CUDA_VISIBLE_DEVICES, and cannot be used.
    """
    kind, index = _parse_device(device, index)
    if kind == "cpu":
        yield _on_cpu(count)
        return
    if torch_cuda() is None:
        if kind == "cuda":
            raise GpuError(
                "The installed torch is built without CUDA. Install one with CUDA, or use the CPU."
            )
        yield _on_cpu(count)
        return
    try:
        nvml = open_nvml(library)
    except NvmlUnavailable as reason:
        if kind == "cuda" and not _has_cuda_driver():
            raise GpuError(
                f"No GPU: CUDA's driver is not installed here, and NVML does not answer ({reason}). Use "
                "--device cpu, or a machine with a GPU."
            ) from None
        unknown = (Target(type="cuda", index=index + rank, doubt=str(reason)) for rank in range(count))
        yield _on_cpu(count) if kind is None else tuple(unknown)
        return
    with nvml:
        if kind is None and (hides_all(environment) or not nvml.cards()):
            yield _on_cpu(count)
        else:
            yield _on_cards(nvml, environment, range(index, index + count))


def _on_cpu(count: int) -> tuple[Target, ...]:
    """Return the CPU `count` times. Raises `GpuError` for more than `MAX_ON_CPU` processes."""
    if count > MAX_ON_CPU:
        raise GpuError(
            f"{count} processes on the CPU, which replaces GPUs only for trials: at "
            f"most {MAX_ON_CPU} are allowed. Name fewer."
        )
    return (Target(type="cpu"),) * count


def _on_cards(nvml: Nvml, environment: Mapping[str, str], indices: range) -> tuple[Target, ...]:
    """Return the devices to measure on for these CUDA indices. Raises `GpuError` where there
    are fewer cards.
    """
    if len(indices) > 1:
        shown = visible_cards(nvml, environment)
        if shown and indices.stop > len(shown):
            listed = ", ".join(f"{number}: {card}" for number, card in enumerate(shown))
            first = f", from GPU {indices.start} on" if indices.start else ""
            raise GpuError(
                f"{len(indices)} GPUs were requested{first}, and CUDA shows {len(shown)} here: {listed}. "
                "Name fewer, or predict for more: snugfit predict ... --gpus N."
            )
    cards = [card_at(nvml, environment, index) for index in indices]
    beside = tuple(card.uuid for card in cards) if len(cards) > 1 else ()
    return tuple(
        Target(type="cuda", card=card, index=index, driver=nvml.driver(), beside=beside)
        for index, card in zip(indices, cards, strict=True)
    )


def gpu_here(device: str | None = None) -> str | None:
    """Return the name of this machine's GPU, or of the GPU `device` (`cuda:1`); None where NVML finds none.
    CUDA is not initialized.
    """
    target = target_here(device)
    return target.card.name if target.card else None


def target_here(device: str | None = None) -> Target:
    """Return the device to measure on for `device`, within a fraction of a second. NVML is closed afterwards,
    so its GPU handle answers no call.
    """
    with open_target(device, 0, environment=os.environ) as target:
        return target


def _has_cuda_driver() -> bool:
    """Return True if CUDA's driver library can be loaded. Loading it creates no context."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


def _parse_device(device: str | None, index: int) -> tuple[str | None, int]:
    """Return torch's type of the device (None without a named one) and the GPU's index. Raises `GpuError` for
    an unknown device."""
    if type(index) is not int or index < 0:
        raise GpuError(f"GPU index {index!r}: GPUs count from 0. Name an index from 0.")
    if device is None or device in ("cpu", "cuda"):
        return device, index
    numbered = re.fullmatch(r"cuda:(\d{1,4})", device) if isinstance(device, str) else None
    if not numbered:
        raise GpuError(f"Unknown device {device!r}. Devices: cpu, cuda, cuda:1. Name one of these.")
    return "cuda", int(numbered[1])


def child_environment(
    inherited: Mapping[str, str], setup: Setup, *, visibility: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables of a measured process, with the effect of these training settings."""
    from snugfit.step.applier import process_environment

    environment = process_environment(
        setup, {name: value for name, value in inherited.items() if not _SECRET.search(name)}
    )
    if environment.pop("PYTHONDONTWRITEBYTECODE", ""):
        cache = inherited.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        if os.path.isabs(cache):
            environment.setdefault("PYTHONPYCACHEPREFIX", str(Path(cache) / "snugfit" / "bytecode"))
    source = Path(__file__).resolve().parents[2]
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")]
    if source not in installed:  # the child must import the same source tree
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(source), environment.get("PYTHONPATH")])
        )
    return {**environment, **visibility, "HF_HUB_OFFLINE": "1"}
