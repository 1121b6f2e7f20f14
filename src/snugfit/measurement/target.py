"""The device that is measured, found without touching CUDA, and the environment of the process that uses it.

The measuring process must not hold a context on the GPU that it measures, so it asks NVML and the environment
only. The child then sees that one GPU and no other, by its UUID. Where NVML does not answer, a GPU is used
only when it was asked for by name, and the measurement says that it could not be proven clean.

The child's environment is ours without secrets, with one device and the recipe's allocator. A list of what is
allowed would lose what makes a user's machine work (library paths, CUDA's and the threads' settings), so
variables are handed on except those whose names say that they hold a secret: a measurement opens no socket
and has no use for them. Images often tell Python to keep no bytecode; each measured process would then
compile torch and transformers again, so bytecode goes to the user's folder of caches.
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
from snugfit.measurement.host import cpu_name
from snugfit.measurement.nvml import Card, NvmlUnavailable, open_nvml
from snugfit.measurement.visible_devices import VISIBLE_DEVICES, card_at, hides_all
from snugfit.versions import torch_cuda

if TYPE_CHECKING:
    from snugfit.results.measurement import Device
    from snugfit.techniques.setup import Setup

_SECRET = re.compile(r"(?:^|_)(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:_|$)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A device for one experiment."""

    type: str
    """`cuda` or `cpu`, as torch calls it."""

    card: Card | None = None
    """The GPU as NVML knows it; None on the CPU, and where NVML does not answer."""

    driver: str | None = None

    index: int = 0
    """CUDA's index of the GPU where no card is known."""

    doubt: str | None = None
    """Why no card is known though a GPU is used."""

    @property
    def torch_device(self) -> str:
        """The device as the child calls it: the only one it sees, where the card is known."""
        if self.type == "cpu":
            return "cpu"
        return "cuda:0" if self.card else f"cuda:{self.index}"

    @property
    def visibility(self) -> dict[str, str]:
        """What the child's environment must say, so that it sees this device and no other."""
        if self.type == "cpu":
            return {VISIBLE_DEVICES: ""}
        return {VISIBLE_DEVICES: self.card.uuid} if self.card else {}

    def describe(self, torch_name: str | None, torch_bytes: int | None) -> Device:
        """The device as a measurement keeps it, by torch's name and total bytes where NVML does not
        answer."""
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
    """The target for `device`: `cpu`, `cuda`, `cuda:1`, or None for a GPU if there is one.

    NVML stays open inside. Raises `GpuError` for a GPU that was asked for, or is meant by
    CUDA_VISIBLE_DEVICES, and cannot be used.
    """
    kind, index = _parse_device(device, index)
    if kind == "cpu":
        yield Target(type="cpu")
        return
    if torch_cuda() is None:
        if kind == "cuda":
            raise GpuError(
                "The installed torch is built without CUDA. Install one with CUDA, or use the CPU."
            )
        yield Target(type="cpu")
        return
    try:
        nvml = open_nvml(library)
    except NvmlUnavailable as reason:
        if kind == "cuda" and not _has_cuda_driver():
            raise GpuError(
                f"No GPU: CUDA's driver is not installed here, and NVML does not answer ({reason}). Use "
                "--device cpu, or a machine with a GPU."
            ) from None
        yield Target(type="cpu") if kind is None else Target(type="cuda", index=index, doubt=str(reason))
        return
    with nvml:
        if kind is None and (hides_all(environment) or not nvml.cards()):
            yield Target(type="cpu")
        else:
            yield Target(type="cuda", card=card_at(nvml, environment, index), driver=nvml.driver())


def gpu_here(device: str | None = None) -> str | None:
    """The name of this machine's GPU, or of the one that `device` (`cuda:1`) names; None where NVML knows
    none. Nothing touches CUDA."""
    target = target_here(device)
    return target.card.name if target.card else None


def target_here(device: str | None = None) -> Target:
    """What `device` means on this machine, found within a fraction of a second; its card answers nothing."""
    with open_target(device, 0, environment=os.environ) as target:
        return target


def _has_cuda_driver() -> bool:
    """Whether the library is there by which torch reaches a GPU. Loading it makes no context."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


def _parse_device(device: str | None, index: int) -> tuple[str | None, int]:
    """Torch's type of the device (None where the user named none) and the GPU's index."""
    if type(index) is not int or index < 0:
        raise GpuError(f"GPU index {index!r}: GPUs count from 0.")
    if device is None or device in ("cpu", "cuda"):
        return device, index
    numbered = re.fullmatch(r"cuda:(\d{1,4})", device) if isinstance(device, str) else None
    if not numbered:
        raise GpuError(f"Unknown device {device!r}. Devices: cpu, cuda, cuda:1.")
    return "cuda", int(numbered[1])


def child_environment(
    inherited: Mapping[str, str], setup: Setup, *, visibility: Mapping[str, str]
) -> dict[str, str]:
    """The variables of the measured process, which runs under this Setup."""
    from snugfit.step.applier import process_environment

    environment = process_environment(
        setup, {name: value for name, value in inherited.items() if not _SECRET.search(name)}
    )
    if environment.pop("PYTHONDONTWRITEBYTECODE", ""):
        cache = inherited.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        environment.setdefault("PYTHONPYCACHEPREFIX", str(Path(cache) / "snugfit" / "bytecode"))
    source = Path(__file__).resolve().parents[2]
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")]
    if source not in installed:  # a source tree: the child must find the same snugfit
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(source), environment.get("PYTHONPATH")])
        )
    return {**environment, **visibility, "HF_HUB_OFFLINE": "1"}
