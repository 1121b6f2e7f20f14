"""Detection of dropout kernels that have their own seeds and do not use torch's random generators."""

from __future__ import annotations

import functools

from snugfit.techniques import roster
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Slot
from snugfit.techniques.wish import used_wishes, wishes


def seeds_dropout(setup: Setup) -> bool:
    """Return True if dropout outside of attention has its own seeds under these settings. A recomputed layer
    then drops the same elements.
    """
    return any(wish.seeded_models for wish in used_wishes(setup))


def draws_once(setup: Setup) -> bool:
    """Return True if a step with these settings cannot draw random numbers again when layers are recomputed,
    as in a CUDA graph.
    """
    return any(wish.draws_once for wish in used_wishes(setup))


def may_be_seeded(model_type: object) -> bool:
    """Return True if installed features can record a step as CUDA graphs and seed all dropout of this model
    type.
    """
    seeded = any(model_type in wish.seeded_models for wish in wishes())
    # Seeds help only in a step that cannot draw again. In other steps, checkpointing restores the generators.
    return seeded and any(wish.draws_once for wish in wishes())


@functools.cache
def try_seeds(advice: str) -> str:
    """Return `advice` with its two `{}` replaced by techniques: kernels with seeded dropout, and steps that
    draw random numbers only once. Empty if one is not installed.
    """
    traits = {Slot.KERNELS: seeds_dropout, Slot.ENGINE: draws_once}
    names = [
        next(
            (
                technique.name
                for technique in roster.techniques()
                if technique.slot is slot and has_it(technique().alone)
            ),
            "",
        )
        # The advice names one technique per trait. If one is not installed, the advice would be wrong.
        for slot, has_it in traits.items()
    ]
    return advice.format(*names) if all(names) else ""
