"""Where an experiment runs: a GPU, known by its NVML card, or the CPU. Found without touching CUDA.

The measuring process must not hold a context on the GPU that it measures, so it asks NVML and the environment
only. The child then sees that one GPU and no other, by its UUID. Where NVML does not answer, a GPU is used
only when it was asked for by name, and the measurement says that it could not be proven clean.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from snugfit.errors import GpuError
from snugfit.measurement.host import cpu_name
from snugfit.measurement.nvml import Card, NvmlUnavailable, open_nvml
from snugfit.measurement.visible_devices import VISIBLE, choose, hides_all
from snugfit.results.measurement import Device
from snugfit.versions import torch_cuda


@dataclass(frozen=True, kw_only=True)
class Target:
    """A device for one experiment."""

    type: str
    """`cuda` or `cpu`."""

    card: Card | None = None
    """The GPU as NVML knows it; None on the CPU, and where NVML does not answer."""

    driver: str | None = None
    """The driver's version."""

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
            return {VISIBLE: ""}
        return {VISIBLE: self.card.uuid} if self.card else {}

    def describe(self, found_name: str | None, found_total: int | None) -> Device:
        """The device as a measurement keeps it, with what the child found where NVML does not answer."""
        if self.type == "cpu":
            return Device(type="cpu", name=cpu_name())
        if self.card is None:
            return Device(type="cuda", name=found_name or "a GPU without NVML", total_bytes=found_total)
        device = Device(type="cuda", name=self.card.name, uuid=self.card.uuid, driver=self.driver)
        try:
            memory = self.card.memory()
        except NvmlUnavailable:
            return device
        return Device(
            type="cuda",
            name=self.card.name,
            uuid=self.card.uuid,
            driver=self.driver,
            total_bytes=memory.total_bytes,
            reserve_bytes=memory.reserve_bytes,
        )


@contextmanager
def open_target(
    device: str | None, index: int, *, environment: Mapping[str, str], library: Any | None = None
) -> Iterator[Target]:
    """The place for `device`: `cpu`, `cuda`, `cuda:1`, or None for a GPU if there is one.

    NVML stays open inside. Raises `GpuError` for a GPU that was asked for, or is meant by
    CUDA_VISIBLE_DEVICES, and cannot be used.
    """
    kind, index = _kind(device, index)
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
        yield Target(type="cpu") if kind is None else Target(type="cuda", index=index, doubt=str(reason))
        return
    with nvml:
        if kind is None and (hides_all(environment) or not nvml.cards()):
            yield Target(type="cpu")
        else:
            yield Target(type="cuda", card=choose(nvml, environment, index), driver=nvml.driver())


def _kind(device: str | None, index: int) -> tuple[str | None, int]:
    if type(index) is not int or index < 0:
        raise GpuError(f"GPU index {index!r}: GPUs are numbered from 0.")
    if device is None or device in ("cpu", "cuda"):
        return device, index
    named = re.fullmatch(r"cuda:(\d{1,4})", device) if isinstance(device, str) else None
    if not named:
        raise GpuError(f"Unknown device {device!r}. Devices: cpu, cuda, cuda:1.")
    return "cuda", int(named[1])
