"""Choice among the recipes that were simulated in full, which is not always the fastest.

Seconds are predicted well for a step that the GPU bounds, and not for one that the host bounds. The time
of FSDP2's Python, DDP's hooks and the user's own code depends on that host. Two recipes with predictions
within some per cent may then differ widely. An example is BERT-large on two H100s (64 x 512).
`fsdp(reshard=none)` was predicted at 112.7 ms and took 169, `ddp(bucket_views=true)` at 112.5 and took 118
(results/h100-2026-11-26/plan-2-bert.json).

    1. of the recipes within `ALIKE` of the fewest seconds, those with the least relevant work of the host
    2. among these the fastest, or the simplest that plans for one GPU count as equally fast
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from snugfit.features.distributed.plan.plan import OnGpus
from snugfit.planning.search.simpler import AS_FAST
from snugfit.techniques.recipe import Recipe

ALIKE = 1.03
"""Factor on the fewest seconds of a step (chosen), within which predictions do not distinguish recipes."""

HOST_MATTERS = 0.75
"""Share of a step (chosen) below which the host's work is irrelevant. Above it, less work is better.

Such a host does not bound the step, even if it takes a third longer than predicted.
"""

HOST_ALIKE = 0.05
"""Difference between two shares of the host's work that counts as equal, as a share of a step (chosen)."""


def best_first(answers: Sequence[OnGpus], limit: float = math.inf) -> list[OnGpus]:
    """Sort simulated recipes: the one that the plan recommends, then the rest by predicted seconds. If the
    first is not the fastest, its `why` has the reason. It takes less than `limit` seconds a step, unless none
    does.
    """
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
    """Return the number of techniques that a recipe names."""
    return sum(not technique.plain for technique in Recipe.parse(one.recipe))


def _why_not(fastest: OnGpus, chosen: OnGpus, *, by_host: bool) -> str:
    faster = 1 - fastest.step_seconds / chosen.step_seconds
    if by_host:
        return (
            f"'{fastest.recipe}' is predicted to be {faster:.1%} faster, but there the host works in "
            f"{fastest.host_share or 0:.0%} of the step and here in {chosen.host_share or 0:.0%}. The "
            "host's seconds are the least certain."
        )
    return f"'{fastest.recipe}' is predicted to be {faster:.1%} faster, too little for the added techniques."
