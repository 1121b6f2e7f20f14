"""The setting that the feature `offload` adds to `Setup`, the training settings of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit.techniques.wish import Wish


@dataclass(frozen=True, kw_only=True)
class OffloadWish:
    """Value of the field `offload`: the activations that are kept in the host's memory until the backward
    pass."""

    what: str = "all"
    """`all` saved tensors of layers, or `checkpoints` for the inputs of checkpoints alone."""

    first: int | None = None
    """Number of layers of each stack whose activations are offloaded, from the first; None takes all. A span
    of layers that is recomputed belongs to its last layer."""


OFFLOAD = Wish[OffloadWish | None]("activation_offload", OffloadWish | None, None, touches=("passes",))
"""The field `offload`: activations to offload; None leaves all on the device."""
