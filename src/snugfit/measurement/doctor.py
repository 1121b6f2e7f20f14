"""The doctor: what is installed here, what is missing and why, and what the GPU's driver says.

Everything is found without importing torch, which takes seconds: versions from the packages' metadata,
torch's CUDA from its version file, GPUs from NVML. `ask_torch=True` imports it and asks it too.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from snugfit.measurement.nvml import Card, NvmlUnavailable, open_nvml
from snugfit.measurement.visible_devices import VISIBLE_DEVICES, hides_all
from snugfit.versions import CORE, OPTIONAL, __version__, torch_cuda, version_of

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Package:
    """One package."""

    name: str
    """As it is installed."""

    version: str | None
    """None when it is not there."""

    required: bool
    """Whether snugfit cannot do without it."""


@dataclass(frozen=True, kw_only=True)
class Extra:
    """One of snugfit's extras, and the techniques that need it."""

    name: str
    """As in `pip install "snugfit[name]"`."""

    techniques: tuple[str, ...]
    """Which it brings."""

    off: str | None
    """Why they are off, with the cure; None when they are on."""


@dataclass(frozen=True, kw_only=True)
class GpuStatus:
    """One GPU of this machine."""

    name: str
    """As the driver calls it."""

    uuid: str
    """Its own."""

    compute_capability: tuple[int, int] | None
    """CUDA's, where the driver tells."""

    total_bytes: int | None
    """The whole framebuffer."""

    used_bytes: int | None
    """Now, by all processes."""

    reserve_bytes: int | None
    """The driver's own; None under drivers that do not show it apart."""

    processes: int | None
    """How many compute on it; None where the driver does not tell."""

    fault: str | None = None
    """What NVML would not tell."""


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """What was found on this machine."""

    snugfit: str
    """Its version."""

    python: str
    """Its version."""

    executable: str
    """The Python that runs this."""

    platform: str
    """Operating system and machine."""

    packages: tuple[Package, ...]
    """Those that snugfit stands on, then those it can use."""

    extras: tuple[Extra, ...]
    """Present, or why off."""

    torch_cuda: str | None
    """The CUDA that torch was built with; None for a build without."""

    cuda_usable: bool
    """Whether a measurement would run on a GPU."""

    cuda_reason: str | None
    """Why not."""

    asked_torch: bool
    """Whether torch itself was asked, or only its files and NVML."""

    driver: str | None
    """The NVIDIA driver's version."""

    nvml: str | None
    """Why NVML does not answer; None when it does."""

    gpus: tuple[GpuStatus, ...]
    """All of the machine, in the order of the PCI bus, whatever CUDA_VISIBLE_DEVICES shows."""

    visible_devices: str | None
    """CUDA_VISIBLE_DEVICES; None when it is not set."""

    def to_json(self) -> dict[str, Any]:
        """The document that `snugfit doctor --json` prints."""
        return {"schema": SCHEMA, "what": "doctor", **asdict(self)}


def examine(
    *, ask_torch: bool = False, library: Any | None = None, environment: Mapping[str, str] = os.environ
) -> Doctor:
    """Examines this machine. Never raises for what is missing: that is what it tells."""
    driver, silence, gpus = _nvml(library)
    build = torch_cuda()
    reason = _why_no_cuda(build, silence, gpus, environment)
    if reason is None and ask_torch:
        reason = _torch_says()
    return Doctor(
        snugfit=__version__,
        python=platform.python_version(),
        executable=sys.executable,
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        packages=tuple(
            Package(name=name, version=version_of(name), required=name in CORE) for name in (*CORE, *OPTIONAL)
        ),
        extras=_extras(),
        torch_cuda=build,
        cuda_usable=reason is None,
        cuda_reason=reason,
        asked_torch=ask_torch,
        driver=driver,
        nvml=silence,
        gpus=gpus,
        visible_devices=environment.get(VISIBLE_DEVICES),
    )


def _nvml(library: Any | None) -> tuple[str | None, str | None, tuple[GpuStatus, ...]]:
    """The driver's version, NVML's reason for silence, and the GPUs."""
    try:
        with open_nvml(library) as nvml:
            return nvml.driver(), None, tuple(_found(card) for card in nvml.cards())
    except NvmlUnavailable as reason:
        return None, str(reason), ()


def _found(card: Card) -> GpuStatus:
    memory, processes, fault = None, None, None
    try:
        memory = card.memory()
        processes = len(card.compute_processes())
    except NvmlUnavailable as reason:
        fault = str(reason)
    return GpuStatus(
        name=card.name,
        uuid=card.uuid,
        compute_capability=card.capability(),
        total_bytes=memory.total_bytes if memory else None,
        used_bytes=memory.used_bytes if memory else None,
        reserve_bytes=memory.reserve_bytes if memory else None,
        processes=processes,
        fault=fault,
    )


def _why_no_cuda(
    build: str | None, silence: str | None, gpus: tuple[GpuStatus, ...], environment: Mapping[str, str]
) -> str | None:
    """Why a measurement would not run on a GPU, as far as can be told without torch."""
    if version_of("torch") is None:
        return "torch is not installed"
    if build is None:
        return f"torch {version_of('torch')} is built without CUDA"
    if silence is not None:
        return f"no NVIDIA driver answers: {silence}"
    if not gpus:
        return "the driver knows no GPU"
    if hides_all(environment):
        return f"{VISIBLE_DEVICES}={environment[VISIBLE_DEVICES]!r} hides every GPU"
    return None


def _torch_says() -> str | None:
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as refusal:
        return f"torch cannot use CUDA: {str(refusal).splitlines()[0]}"
    return None


def _extras() -> tuple[Extra, ...]:
    """By the roster: each extra with the techniques that need it."""
    from snugfit.techniques.roster import techniques

    needing: dict[str, list[Any]] = {}
    for technique in techniques():
        if technique.extra:
            needing.setdefault(technique.extra, []).append(technique)
    return tuple(
        Extra(
            name=name,
            techniques=tuple(technique.name for technique in found),
            off=next((reason for technique in found if (reason := technique.missing_package())), None),
        )
        for name, found in sorted(needing.items())
    )
