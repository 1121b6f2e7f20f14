"""The versions, the builds and the GPUs that a bug report needs.

A report may be public, so it has no path, no host name and no UUID of a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, ClassVar

from snugfit.documents import JsonDocument
from snugfit.features.doctor.examine import examine
from snugfit.report.text.facts import Facts
from snugfit.units import show_bytes
from snugfit.versions import versions


@dataclass(frozen=True, kw_only=True)
class GpuModel:
    """One GPU of this machine: its name, compute capability and memory."""

    name: str
    compute_capability: tuple[int, int] | None
    """CUDA compute capability, such as (9, 0); None if unknown."""
    total_bytes: int | None
    """Bytes of the GPU's total memory; None if unknown."""


@dataclass(frozen=True, kw_only=True)
class Environment(JsonDocument):
    """The environment of a bug report: versions, builds, driver and GPUs."""

    what: ClassVar = "env"

    versions: Mapping[str, str]
    """Installed versions by name: Python, snugfit, its plugins, and packages that it uses."""
    build: str
    """Origin of the installed snugfit: `package index`, `local file`, `editable`, `source` or its commit."""
    torch_build: str
    """The build of torch, such as `CUDA 13.0`; `CPU` for a build without CUDA."""
    platform: str
    """Operating system and processor architecture."""
    driver: str | None
    """The version of the NVIDIA driver; None if NVML reports none."""
    gpus: tuple[GpuModel, ...]
    """All GPUs of the machine in the order of the PCI bus."""
    cuda_reason: str | None
    """Reason why no measurement can run on a GPU; None if one can."""


def environment(library: Any | None = None) -> Environment:
    """Return the environment of this process. `library` replaces the binding of NVML."""
    doctor = examine(library=library)
    return Environment(
        versions=versions(),
        build=_build(),
        torch_build=f"CUDA {doctor.torch_cuda}" if doctor.torch_cuda else "CPU",
        platform=doctor.platform,
        driver=doctor.driver,
        gpus=tuple(
            GpuModel(name=gpu.name, compute_capability=gpu.compute_capability, total_bytes=gpu.total_bytes)
            for gpu in doctor.gpus
        ),
        cuda_reason=doctor.cuda_reason,
    )


def _build() -> str:
    """Return the origin of the installed snugfit, from the file that pip writes (PEP 610)."""
    try:
        text = metadata.distribution("snugfit").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return "source"
    origin = json.loads(text or "{}")
    if "vcs_info" in origin:
        return f"commit {origin['vcs_info']['commit_id']}"
    if origin.get("dir_info", {}).get("editable"):
        return "editable"
    return "local file" if origin else "package index"


def render(state: Environment) -> Facts:
    """Return the report of `snugfit env`, one line for each fact."""
    installed = dict(state.versions)
    own, python = f"{installed.pop('snugfit')} ({state.build})", installed.pop("python")
    torch = f"{installed.pop('torch', 'not installed')} ({state.torch_build})"
    packages = ", ".join(f"{name} {version}" for name, version in installed.items())
    gpus = tuple(("GPU", _line(gpu)) for gpu in state.gpus) or (("GPU", "none"),)
    return Facts(
        (
            ("snugfit", own),
            ("Python", python),
            ("torch", torch),
            ("packages", packages),
            ("platform", state.platform),
            *gpus,
            ("driver", state.driver or "none"),
            ("CUDA", f"not usable: {state.cuda_reason}" if state.cuda_reason else "usable"),
        )
    )


def _line(gpu: GpuModel) -> str:
    capability = ".".join(map(str, gpu.compute_capability or ("?",)))
    memory = "?" if gpu.total_bytes is None else show_bytes(gpu.total_bytes)
    return f"{gpu.name}, {memory}, compute capability {capability}"
