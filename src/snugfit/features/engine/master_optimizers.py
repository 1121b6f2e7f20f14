"""Constructors of the optimizers that update master weights in two halves: two versions of AdamW."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from snugfit.techniques.setup import Call, OptimizerWish, Setup

MASTER_ADAMW = OptimizerWish(
    factory=Call(path="snugfit.features.engine.masters.adamw:MasterAdamW"),
    shapes=Call(path="snugfit.features.engine.masters.launches:shapes"),
)
"""The optimizer setting of `MasterAdamW`. The HF Trainer has no name for this optimizer."""

COMPACT_ADAMW = OptimizerWish(
    factory=Call(path="snugfit.features.engine.masters.compact_adamw:CompactAdamW"),
    shapes=Call(path="snugfit.features.engine.masters.launches:shapes"),
)
"""The optimizer setting of `CompactAdamW`, with 8-bit moments. It also updates fp32 weights."""


def compact_adamw(master_bits: Literal[32, 24]) -> OptimizerWish:
    """Return the constructor of the AdamW with 8-bit moments, for master weights of this number of bits."""
    if master_bits == 32:
        return COMPACT_ADAMW
    factory = replace(COMPACT_ADAMW.factory, arguments={"master_bits": master_bits})
    return replace(COMPACT_ADAMW, factory=factory)


def master_adamw() -> OptimizerWish:
    """Return the constructor of AdamW over master weights: on a GPU it is one kernel, which replaces each of
    torch's variants.
    """
    return MASTER_ADAMW


def keeps_masters(setup: Setup) -> bool:
    """Return True if this Setup's optimizer updates 32-bit master weights."""
    return setup.optimizer_path in (MASTER_ADAMW.factory.path, COMPACT_ADAMW.factory.path)
