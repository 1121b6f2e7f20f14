"""What the bytes of a trace are for.

Weights, gradients, states, caches and workspaces were claimed by name while the run went on. For the rest
the trace decides: what is born in the forward pass and still lives when that pass ends was saved for the
backward pass, and is an activation; so is what checkpointing computes again. Everything else is temporary.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import pairwise

from snugfit.rehearsal.trace.trace import Mark
from snugfit.results.footprint import Kind


def kinds(
    claimed: Sequence[str],
    phases: Sequence[str],
    recomputed: frozenset[int],
    events: Sequence[int],
    marks: Sequence[Mark],
) -> list[str]:
    """The kind of each block; `claimed[i]` is `""` where nobody has claimed block i yet."""
    births: dict[int, int] = {}
    deaths: dict[int, int] = {}
    for position, event in enumerate(events):
        (births if event > 0 else deaths)[abs(event) - 1] = position
    ends = [after.event for before, after in pairwise(marks) if before.phase == "forward"]
    decided = []
    for index, kind in enumerate(claimed):
        born, died = births.get(index, 0), deaths.get(index)
        decided.append(kind or _decide(phases[index], index in recomputed, born, died, ends))
    return decided


def _decide(phase: str, recomputed: bool, born: int, died: int | None, ends: Sequence[int]) -> str:
    if phase == "load":
        return Kind.INPUTS
    if phase == "build" and died is None:
        return Kind.WEIGHTS
    if phase == "update" and died is None:
        return Kind.OPTIMIZER_STATES
    if recomputed:
        return Kind.ACTIVATIONS
    if phase == "forward":
        place = bisect.bisect_right(ends, born)
        if place < len(ends) and (died is None or died >= ends[place]):
            return Kind.ACTIVATIONS
    return Kind.TEMPORARIES
