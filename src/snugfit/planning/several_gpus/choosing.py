"""Which of the recipes that were simulated in full is the answer: not always the one of the fewest seconds.

Where the GPU bounds a step its seconds are predicted well, and where the host does they are not: FSDP2's
Python, DDP's hooks and the user's own code take what they take on that host. Two recipes that are forecast
within some per cent may then lie far apart: of BERT-large on two H100s (64 x 512) `fsdp(reshard=none)` was
forecast as 112.7 ms and took 169, `ddp(bucket_views=true)` as 112.5 and took 118
(results/h100-2026-11-26/plan-2-bert.json).

    1. of what is within `ALIKE` of the fewest seconds, what has the host work least, as far as that matters
    2. of that the fastest, or the simplest of what plans for one GPU call as fast
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from snugfit.planning.search.simpler import AS_FAST
from snugfit.planning.several_gpus.plan import OnGpus
from snugfit.techniques.recipe import Recipe

ALIKE = 1.03
"""Times the fewest seconds of a step (chosen): no prediction tells recipes apart that are nearer."""

HOST_MATTERS = 0.75
"""Of a step (chosen): a host that works less of it does not bound it, not even where it takes a third longer
than predicted. Above this, less of its work is better."""

HOST_ALIKE = 0.05
"""Of a step (chosen): shares of the host's work that are no further apart are alike."""


def best_first(answers: Sequence[OnGpus], limit: float = math.inf) -> list[OnGpus]:
    """The answer, with the reason where it is not the fastest, then the others, the fastest first. It takes
    less than `limit` seconds a step, unless nothing does."""
    fastest, *slower = sorted(answers, key=lambda one: (one.step_seconds, _host_share(one), _length(one)))
    near = [one for one in slower if one.step_seconds < min(ALIKE * fastest.step_seconds, limit)]
    least = min(_host_share(one) for one in (fastest, *near))
    calm = [one for one in (fastest, *near) if _host_share(one) <= least + HOST_ALIKE]
    most = (1 + AS_FAST) * calm[0].step_seconds
    chosen = min((one for one in calm if one.step_seconds <= most), key=_length)
    if chosen is fastest:
        return [fastest, *slower]
    why = " ".join(filter(None, (chosen.why, _why_not(fastest, chosen, by_host=fastest not in calm))))
    return [replace(chosen, why=why), *(one for one in (fastest, *slower) if one is not chosen)]


def _host_share(one: OnGpus) -> float:
    return max(one.host_share or 0.0, HOST_MATTERS)


def _length(one: OnGpus) -> int:
    """How many techniques a recipe names."""
    return sum(not technique.plain for technique in Recipe.parse(one.recipe))


def _why_not(fastest: OnGpus, chosen: OnGpus, *, by_host: bool) -> str:
    faster = 1 - fastest.step_seconds / chosen.step_seconds
    if by_host:
        return (
            f"'{fastest.recipe}' is predicted to be {faster:.1%} faster, but there the host works in "
            f"{fastest.host_share or 0:.0%} of the step and here in {chosen.host_share or 0:.0%}, and what "
            "the host takes is the least certain."
        )
    return f"'{fastest.recipe}' is predicted to be {faster:.1%} faster, which is too little for what it adds."
