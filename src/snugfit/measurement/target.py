"""The device that is measured, found without touching CUDA, and the environment of the process that uses it.

The measuring process must not hold a context on the GPU that it measures, so it asks NVML and the environment
only. The child then sees that one GPU and no other, by its UUID. Processes that train together see all of
theirs, as under torchrun, each with the one that its rank names as its current device: NCCL finds the links
between GPUs that a process sees in any version, and a context that strays onto another's GPU, which a user
pays for too, shows in that one's bytes. Where NVML does not answer, a GPU is used
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
from snugfit.measurement.nvml import Card, Nvml, NvmlUnavailable, open_nvml
from snugfit.measurement.visible_devices import VISIBLE_DEVICES, card_at, hides_all, visible_cards
from snugfit.versions import torch_cuda

if TYPE_CHECKING:
    from snugfit.results.measurement import Device
    from snugfit.techniques.setup import Setup

_SECRET = re.compile(r"(?:^|_)(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:_|$)", re.IGNORECASE)


MAX_ON_CPU = 16
"""Processes that train together without a GPU: chosen, as many as a node has GPUs."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A device for one experiment."""

    type: str
    """`cuda` or `cpu`, as torch calls it."""

    card: Card | None = None
    """The GPU as NVML knows it; None on the CPU, and where NVML does not answer."""

    driver: str | None = None

    index: int = 0
    """CUDA's index of the GPU, as this process counts."""

    doubt: str | None = None
    """Why no card is known though a GPU is used."""

    beside: tuple[str, ...] = ()
    """The UUIDs of all GPUs that train together, this one's among them; empty for one alone."""

    @property
    def torch_device(self) -> str:
        """The device as the child calls it: the only one it sees, where the card is known and alone."""
        if self.type == "cpu":
            return "cpu"
        if self.card and self.beside:
            return f"cuda:{self.beside.index(self.card.uuid)}"
        return "cuda:0" if self.card else f"cuda:{self.index}"

    @property
    def visibility(self) -> dict[str, str]:
        """What the child's environment must say, so that it sees this device and no other, or all that train
        together."""
        if self.type == "cpu":
            return {VISIBLE_DEVICES: ""}
        if self.beside:
            return {VISIBLE_DEVICES: ",".join(self.beside)}
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
    """The one target for `device`, as `open_targets` gives it."""
    with open_targets(device, index, 1, environment=environment, library=library) as targets:
        yield targets[0]


@contextmanager
def open_targets(
    device: str | None, index: int, count: int, *, environment: Mapping[str, str], library: Any | None = None
) -> Iterator[tuple[Target, ...]]:
    """The targets for `device`: `cpu`, `cuda`, `cuda:1`, or None for GPUs if there are any; so many, in
    CUDA's order from that GPU on.

    NVML stays open inside. Raises `GpuError` for a GPU that was asked for, or is meant by
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
    """The CPU, for so many processes. Raises `GpuError` for more than it is meant for."""
    if count > MAX_ON_CPU:
        raise GpuError(
            f"{count} processes on the CPU, which takes the place of GPUs only to try things out: at "
            f"most {MAX_ON_CPU} are allowed."
        )
    return (Target(type="cpu"),) * count


def _on_cards(nvml: Nvml, environment: Mapping[str, str], indices: range) -> tuple[Target, ...]:
    """The cards that CUDA calls by these indices. Raises `GpuError` where there are not so many."""
    if len(indices) > 1:
        shown = visible_cards(nvml, environment)
        if shown and indices.stop > len(shown):
            listed = ", ".join(f"{number}: {card}" for number, card in enumerate(shown))
            first = f", from GPU {indices.start} on" if indices.start else ""
            raise GpuError(
                f"{len(indices)} GPUs were asked for{first}, and CUDA shows {len(shown)} here: {listed}. "
                "Name fewer, or predict for more: snugfit predict ... --gpus N."
            )
    cards = [card_at(nvml, environment, index) for index in indices]
    beside = tuple(card.uuid for card in cards) if len(cards) > 1 else ()
    return tuple(
        Target(type="cuda", card=card, index=index, driver=nvml.driver(), beside=beside)
        for index, card in zip(indices, cards, strict=True)
    )


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
