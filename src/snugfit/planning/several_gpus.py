"""Plans for several GPUs that train one model together. A feature with techniques for them computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from snugfit.errors import UsageError
from snugfit.techniques.registry import hooks

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job


def group_plans() -> Any:
    """Return the feature's module of these plans and their commands. Raises `UsageError` without one."""
    for processes in hooks("processes"):
        return processes().plans()
    raise UsageError(
        "Plans for several GPUs need techniques for them, and none is installed. Plan for one GPU."
    )


def plan_several_gpus(job: Job, *, gpu: Gpu | str, gpus: int | Sequence[int], **asked: Any) -> Any:
    """Return the fastest recipe that fits for each of these numbers of GPUs, with the same global batch.

    The answer has `answers` with `gpus`, `recipe` and figures, and the `fastest`, `fewest` and `cheapest` of
    them. The arguments `memory_bytes`, `headroom`, `fidelity`, `keep`, `free`, `workers` and `tell` are those
    of `plan`. Raises `UsageError` for invalid arguments, and `SnugfitError` if nothing can be simulated.
    """
    return group_plans().plan_several_gpus(job, gpu=gpu, gpus=gpus, **asked)
