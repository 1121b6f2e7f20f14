"""What a GPU takes for its own workspaces and scratch, beside what others take that share its search."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from snugfit.planning.cost.figures import Figures

OWN_SHARE = 0.02
"""Of the bytes that a recipe takes, how many may be another GPU's workspaces and scratch (chosen). Mostly it
is fewer: between GPUs of 28 and of 188 multiprocessors 112 MiB of 9.9 GiB (BERT-large, batch 32). In small
batches it is more: between an L4 and an RTX 5090 292 MiB of 7.4 GiB (BERT-large, batch 4, tf32). What differs
by more than this is simulated by the search's policy too, which tells whether all of it is the GPU's own."""

SIBLING_SHARE = 0.002
"""Of the bytes of a recipe that shares its passes with one that was simulated by the GPU's own policy, how
many may still be another: the scratch of its update, and what the allocator rounds (chosen)."""


class OwnBytes(NamedTuple):
    """What a recipe takes more by a GPU's own policy than by the one that the search judges by."""

    requested: int
    allocated: int
    reserved: int

    @classmethod
    def between(cls, own: Figures, other: Figures) -> Self:
        """What `own` takes more than `other`."""
        return cls(*(one - two for one, two in zip(own[:3], other[:3], strict=True)))

    def added_to(self, figures: Figures) -> Figures:
        """What such a recipe takes by the GPU's own policy, of which these figures are by the other."""
        return figures._replace(
            requested_bytes=figures.requested_bytes + self.requested,
            allocated_bytes=figures.allocated_bytes + self.allocated,
            reserved_bytes=figures.reserved_bytes + self.reserved,
        )
