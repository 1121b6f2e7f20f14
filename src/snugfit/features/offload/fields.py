"""The field of `Setup` that this feature adds."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit.techniques.wish import Wish


@dataclass(frozen=True, kw_only=True)
class OffloadWish:
    """Activations that wait for the backward pass in the memory of the host."""

    what: str = "all"
    """`all` that layers save, or of `checkpoints` their inputs alone."""

    first: int | None = None
    """Number of layers of each stack that send theirs, from the first; None takes all. A span of layers that
    is recomputed belongs to its last layer."""


OFFLOAD = Wish[OffloadWish | None]("activation_offload", OffloadWish | None, None, touches=("passes",))
"""Activations that wait on the host; None leaves all on the device."""
