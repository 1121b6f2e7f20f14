"""The field of `Setup` that this feature adds."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit.techniques.wish import Wish


@dataclass(frozen=True, kw_only=True)
class OffloadWish:
    """Setting of activations in the host's memory until the backward pass."""

    what: str = "all"
    """`all` saved tensors of layers, or `checkpoints` for the inputs of checkpoints alone."""

    first: int | None = None
    """Number of layers of each stack that send theirs, from the first; None takes all. A span of layers that
    is recomputed belongs to its last layer."""


OFFLOAD = Wish[OffloadWish | None]("activation_offload", OffloadWish | None, None, touches=("passes",))
"""Activations to offload; None leaves all on the device."""
