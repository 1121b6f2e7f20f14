"""Kernels that draw dropout from seeds of their own, and not from torch's generators: those of features."""

from __future__ import annotations

import functools

from snugfit.techniques import roster
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Slot
from snugfit.techniques.wish import wishes


def seeds_dropout(setup: Setup) -> bool:
    """Return whether dropout outside of attention has seeds, so that a recomputed layer drops the same
    elements.
    """
    return any(wish.seeded_models and wish.of(setup) != wish.default for wish in wishes())


def may_be_seeded(model_type: object) -> bool:
    """Return whether some kernels seed all dropout of such a model outside of attention."""
    return any(model_type in wish.seeded_models for wish in wishes())


@functools.cache
def try_seeds(advice: str) -> str:
    """Return this advice with the technique whose kernels have seeds in the place of `{}`; empty where no
    feature has one."""
    in_slot = [one for one in roster.techniques() if one.slot is Slot.KERNELS]
    return next((advice.format(one.name) for one in in_slot if seeds_dropout(one().alone)), "")
