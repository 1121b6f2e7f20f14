"""Which optimizers update masters of weights that are kept in halves: two AdamWs of our own."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from snugfit.techniques.setup import Call, OptimizerWish, Setup

MASTER_ADAMW = OptimizerWish(
    factory=Call(path="snugfit.step.wishes.masters.adamw:MasterAdamW"),
    shapes=Call(path="snugfit.step.wishes.masters.launches:shapes"),
)
"""Our own optimizer; the HF Trainer has no name for it."""

COMPACT_ADAMW = OptimizerWish(
    factory=Call(path="snugfit.step.wishes.masters.compact_adamw:CompactAdamW"),
    shapes=Call(path="snugfit.step.wishes.masters.launches:shapes"),
)
"""The same with moments in 8 bits, which updates weights in fp32 too."""


def compact_adamw(master_bits: Literal[32, 24]) -> OptimizerWish:
    """`COMPACT_ADAMW` over masters of so many bits."""
    if master_bits == 32:
        return COMPACT_ADAMW
    factory = replace(COMPACT_ADAMW.factory, arguments={"master_bits": master_bits})
    return replace(COMPACT_ADAMW, factory=factory)


def with_adamw(setup: Setup, wish: OptimizerWish) -> Setup:
    """The Setup with this AdamW; where masters of weights are asked for, with the one that keeps them, which
    is one kernel on a GPU whichever of torch's was named."""
    return setup.with_fields(optimizer=MASTER_ADAMW if setup.masters else wish)


def keeps_masters(setup: Setup) -> bool:
    """Whether this Setup's optimizer updates masters."""
    return setup.optimizer.factory.path in (MASTER_ADAMW.factory.path, COMPACT_ADAMW.factory.path)
