"""What a step takes at least that recomputes some of its layers, by two others: none recomputed, and each.

Recomputing each n-th layer takes no less memory than recomputing each, and as long as the GPU's arithmetic
decides, its seconds lie on the line between these. Recomputing spans of layers takes nearly as long as
recomputing each by itself; their bytes say nothing of it.
"""

from __future__ import annotations

from typing import NamedTuple

from snugfit.planning.cost.figures import Bound

CACHE_SHARE = 0.1
"""Of the seconds of a step without recomputing, how much less one with it may take."""

ARITHMETIC_SHARE = 0.4
"""Of the seconds of a step without recomputing, how much longer at most one takes that recomputes each layer,
where the GPU's arithmetic decides (chosen): another forward pass is a third of it. Where it is more, the host
decides at one of the ends, and no line joins them."""

SPANS_SHARE = 0.1
"""Of the seconds of recomputing each layer by itself, how much less recomputing spans of them may take, which
needs fewer calls (0.06 for GPT-2 in bf16 at 8 x 1024 on an H200)."""

ROUNDING = 0.001
"""Of what its twin takes, how much less a kind may take that was held to be no better: a sum of seconds in
another order, an allocation of a few bytes."""


class Ends(NamedTuple):
    """Two candidates between which one lies that recomputes some of its layers."""

    none: int
    """The same without recomputing."""
    all: int
    """The same that recomputes each layer."""
    share: float
    """Of the layers, which it recomputes at least."""
    by_layer: bool
    """Whether each of these is recomputed by itself."""


def least_between(none: Bound, full: Bound, ends: Ends) -> Bound:
    """The least that a candidate takes that has these ends, as far as they tell."""
    seconds, rest = 0.0, 1 - ends.share
    if none.seconds < full.seconds <= none.seconds * (1 + ARITHMETIC_SHARE):
        seconds = none.seconds * rest * (1 - CACHE_SHARE) + full.seconds * ends.share
    if not ends.by_layer:
        return Bound(0, seconds * (1 - SPANS_SHARE))
    return Bound(int(full.needed_bytes * (1 - ROUNDING)), seconds)
