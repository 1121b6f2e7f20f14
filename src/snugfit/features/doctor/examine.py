"""Examination of the installation: packages, missing packages with the reason, and the GPUs of the driver.

No function imports torch, which takes seconds. Versions come from the packages' metadata, torch's CUDA from
its version file, GPUs from NVML.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from snugfit.documents import JsonDocument
from snugfit.measurement.host import spill_to_host
from snugfit.measurement.nvml import Card, NvmlUnavailable, open_nvml
from snugfit.measurement.visible_devices import VISIBLE_DEVICES, hides_all
from snugfit.versions import CORE, OPTIONAL, __version__, torch_cuda, version_of


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package that snugfit uses, with its installed version."""

    name: str
    version: str | None
    """Installed version; None if the package is not installed."""
    required: bool
    """True if snugfit cannot run without the package."""


@dataclass(frozen=True, kw_only=True)
class Extra:
    """One of snugfit's optional dependency groups (`pip install "snugfit[...]"`), and the techniques that
    need it.
    """

    name: str
    """Name of the extra in `pip install "snugfit[name]"`."""
    techniques: tuple[str, ...]
    """Names of the techniques that need packages of this extra."""
    off: str | None
    """Reason why the techniques cannot be used, with a remedy; None if they can."""


@dataclass(frozen=True, kw_only=True)
class GpuStatus:
    """One GPU of this machine: its name, compute capability, memory and processes."""

    name: str
    uuid: str
    compute_capability: tuple[int, int] | None
    """CUDA compute capability, such as (9, 0); None if unknown."""
    total_bytes: int | None
    """Bytes of the GPU's total memory."""
    used_bytes: int | None
    """Bytes of GPU memory that all processes use now."""
    reserve_bytes: int | None
    """Bytes that the driver reserves for itself; None under drivers that do not report them."""
    processes: int | None
    """Number of processes with a CUDA context on the GPU; None if the driver hides them."""
    fault: str | None = None
    """Reason why a value of this GPU is missing; None if none is."""


@dataclass(frozen=True, kw_only=True)
class Doctor(JsonDocument):
    """The state of this machine: packages, extras (optional packages), driver and GPUs."""

    what: ClassVar = "doctor"

    snugfit: str
    """The installed version of snugfit."""
    python: str
    """The version of Python."""
    executable: str
    """The path of the running Python interpreter."""
    platform: str
    """Operating system and processor architecture."""
    packages: tuple[Package, ...]
    """Python packages that snugfit uses: first required, then optional ones."""
    extras: tuple[Extra, ...]
    """Optional groups of packages that techniques need."""
    torch_cuda: str | None
    """The CUDA version for which torch was built; None for a build without CUDA."""
    cuda_usable: bool
    """True if a measurement can run on a GPU."""
    cuda_reason: str | None
    """Reason why no measurement can run on a GPU; None if one can."""
    asked_torch: bool = False
    """Always False: torch's files and NVML give the versions, because an import of torch takes seconds."""
    driver: str | None
    """The version of the NVIDIA driver."""
    nvml: str | None
    """Reason why NVIDIA's management library (NVML) gives no data; None if it does."""
    gpus: tuple[GpuStatus, ...]
    """All GPUs of the machine in the order of the PCI bus, regardless of CUDA_VISIBLE_DEVICES."""
    spills: str | None = None
    """Description of a driver that moves data from a full GPU to the host's memory; None for other drivers.
    """
    visible_devices: str | None
    """Value of the environment variable CUDA_VISIBLE_DEVICES; None if it is not set."""


def examine(*, library: Any | None = None, environment: Mapping[str, str] = os.environ) -> Doctor:
    """Return the packages, extras, driver and GPUs of this machine. A missing package or driver is reported
    and never raised.
    """
    gpus: tuple[GpuStatus, ...] = ()
    driver = nvml_fault = None
    try:
        with open_nvml(library) as nvml:
            driver, gpus = nvml.driver(), tuple(_status_of(card) for card in nvml.cards())
    except NvmlUnavailable as refusal:
        nvml_fault = str(refusal)
    build = torch_cuda()
    reason = _why_no_cuda(build, nvml_fault, gpus, environment)
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
        driver=driver,
        nvml=nvml_fault,
        gpus=gpus,
        spills=spill_to_host(),
        visible_devices=environment.get(VISIBLE_DEVICES),
    )


def _status_of(card: Card) -> GpuStatus:
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
    build: str | None, nvml_fault: str | None, gpus: tuple[GpuStatus, ...], environment: Mapping[str, str]
) -> str | None:
    """Return the reason why a measurement cannot run on a GPU, found without importing torch. Return None if
    it can run.
    """
    if version_of("torch") is None:
        return "torch is not installed"
    if build is None:
        return f"torch {version_of('torch')} is built without CUDA"
    if nvml_fault is not None:
        return f"no NVIDIA driver was found: {nvml_fault}"
    if not gpus:
        return "the driver finds no GPU"
    if hides_all(environment):
        return f"{VISIBLE_DEVICES}={environment[VISIBLE_DEVICES]!r} hides every GPU"
    return None


def _extras() -> tuple[Extra, ...]:
    """Return each extra (group of optional packages) with the techniques that need it."""
    from snugfit.techniques.roster import techniques

    needing: dict[str, list[Any]] = {}
    for technique in techniques():
        if technique.extra:
            needing.setdefault(technique.extra, []).append(technique)
    return tuple(
        Extra(
            name=name,
            techniques=tuple(technique.name for technique in techniques_of),
            off=next(
                (reason for technique in techniques_of if (reason := technique.missing_package())), None
            ),
        )
        for name, techniques_of in sorted(needing.items())
    )
