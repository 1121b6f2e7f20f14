"""Access to plans for several GPUs that train one model together, which the feature for several GPUs
computes.
"""

from __future__ import annotations

from typing import Any

from snugfit.errors import UsageError
from snugfit.techniques.registry import hooks


def group_plans() -> Any:
    """Return the module that plans training on several GPUs. Raises `UsageError` if the feature for it is
    missing.
    """
    for processes in hooks("processes"):
        return processes().plans()
    raise UsageError(
        "Plans for several GPUs need techniques for them, and none is installed. Plan for one GPU."
    )
