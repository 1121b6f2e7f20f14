"""Select the cases in which kernels are compared with their references. A GPU and `make test-all` run all
cases. `make test` runs a few, because Triton's interpreter takes seconds for each. Each dtype, setting and
size occurs in these few, but not each combination."""

from __future__ import annotations

import os


def asks_all(device: str = "cpu") -> bool:
    """Return true if every case is compared on this device."""
    return device == "cuda" or bool(os.environ.get("SNUGFIT_ALL_TRUTH"))
