"""Versions of the packages that determine memory and time, read from their metadata without an import."""

from __future__ import annotations

import functools
import platform
import re
from importlib import util
from pathlib import Path

from snugfit.feature_folders import plugin_versions

__version__ = "0.1.0"
"""The version of snugfit itself."""

CORE = ("torch", "transformers", "safetensors", "numpy")
"""Packages that snugfit requires, in the order of display."""

OPTIONAL = (
    "accelerate", "psutil", "nvidia-ml-py", "bitsandbytes", "peft", "triton", "liger-kernel", "deepspeed",
    "datasets",
)  # fmt: skip
"""Optional packages, recorded where they are installed."""


def version_of(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    from importlib import metadata

    try:
        return _installed_version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _installed_version(package: str) -> str:
    """Return the version of an installed package.

    It is cached, because the metadata are parsed in full. A missing package is not, for it may be installed
    later.
    """
    from importlib import metadata

    return metadata.version(package)


def versions() -> dict[str, str]:
    """Return the installed versions of `python`, `snugfit`, plugins, and packages of `CORE` and `OPTIONAL`,
    by name.
    """
    installed = {"python": platform.python_version(), "snugfit": __version__}
    for package in (*CORE, *OPTIONAL):
        version = version_of(package)
        if version is not None:
            installed[package] = version
    return installed | plugin_versions()


def torch_cuda() -> str | None:
    """Return the CUDA version of the installed torch, or None for a build without CUDA.

    It is read from torch/version.py, because importing torch takes seconds.
    """
    spec = util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        text = (Path(next(iter(spec.submodule_search_locations))) / "version.py").read_text()
    except OSError:
        return None
    match = re.search(r"^cuda(?:: [^=]+)? = '([^']+)'", text, re.MULTILINE)
    return match[1] if match else None
