"""Bytes of a GPU's own workspaces and scratch, relative to the other GPUs of its search."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from snugfit.planning.cost.figures import Figures

OWN_SHARE = 0.02
"""Greatest share of a recipe's bytes that may be another GPU's workspaces and scratch (chosen).

The share is mostly smaller: GPUs of 28 and of 188 multiprocessors differ by 112 MiB of 9.9 GiB
(BERT-large, batch 32). Small batches have a larger share. An L4 and an RTX 5090 differ by 292 MiB of 7.4
GiB (BERT-large, batch 4, tf32). Recipes that differ by more are simulated by the search's policy too. The
result shows if the difference belongs to the GPU.
"""

SIBLING_SHARE = 0.002
"""Greatest share of a sibling's bytes that may still differ (chosen).

A sibling shares its passes with a recipe that was simulated by the GPU's own policy. The rest is the
scratch of its update, and the allocator's rounding.
"""


class OwnBytes(NamedTuple):
    """Additional bytes of a recipe by a GPU's own policy, compared with the policy of the search."""

    requested: int
    allocated: int
    reserved: int

    @classmethod
    def between(cls, own: Figures, other: Figures) -> Self:
        """Return the additional bytes of `own` over `other`."""
        return cls(*(one - two for one, two in zip(own[:3], other[:3], strict=True)))

    def added_to(self, figures: Figures) -> Figures:
        """Return the figures by the GPU's own policy, from those by the policy of the search."""
        return figures._replace(
            requested_bytes=figures.requested_bytes + self.requested,
            allocated_bytes=figures.allocated_bytes + self.allocated,
            reserved_bytes=figures.reserved_bytes + self.reserved,
        )
