"""The boundaries between steps at which a run evaluates and saves: transformers' `DefaultFlowCallback`."""

from __future__ import annotations


def is_due(strategy: str, every: int, step: int, steps: int, steps_per_epoch: int) -> bool:
    """Return True if `strategy` includes the boundary after `step`, of a run of `steps` steps.

    The run's end is included by each strategy but `no`.
    """
    if strategy == "no":
        return False
    return step == steps or step % (steps_per_epoch if strategy == "epoch" else every) == 0
