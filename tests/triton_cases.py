"""In which cases kernels are laid beside their references: all on a GPU and in `make test-all`, and a few in
`make test`, where Triton's interpreter takes seconds for each. What a dtype, a setting or a size does to a
kernel is in those few, though not each with each."""

from __future__ import annotations

import os


def asks_all(device: str = "cpu") -> bool:
    """Whether every case is compared on this device."""
    return device == "cuda" or bool(os.environ.get("SNUGFIT_ALL_TRUTH"))
