"""Which optimizer updates masters of weights that are kept in halves: AdamW alone has one."""

from __future__ import annotations

from dataclasses import replace

from snugfit.techniques.setup import Call, OptimizerWish, Setup

MASTER_ADAMW = OptimizerWish(
    factory=Call(path="snugfit.step.wishes.masters.adamw:MasterAdamW"),
    shapes=Call(path="snugfit.step.wishes.masters.launches:shapes"),
)
"""Our own optimizer; the HF Trainer has no name for it."""


def with_adamw(setup: Setup, wish: OptimizerWish) -> Setup:
    """The Setup with this AdamW; where masters of weights are asked for, with the one that keeps them, which
    is one kernel on a GPU whichever of torch's was named."""
    return replace(setup, optimizer=MASTER_ADAMW if setup.masters else wish)


def keeps_masters(setup: Setup) -> bool:
    """Whether this Setup's optimizer updates masters."""
    return setup.optimizer.factory == MASTER_ADAMW.factory
