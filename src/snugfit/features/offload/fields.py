"""The setting that the feature `offload` adds to `Setup`, the training settings of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit.techniques.wish import Wish


@dataclass(frozen=True, kw_only=True)
class OffloadWish:
    """Value of the field `offload`: the activations that are kept in the host's memory until the backward
    pass."""

    what: str = "all"
    """Offloaded tensors: `all` that layers save, or `checkpoints`, the inputs of recomputed layers."""

    first: int | None = None
    """Number of layers of each stack whose activations are offloaded, from the first on; None for all. A
    recomputed span of layers belongs to its last layer.
    """


OFFLOAD = Wish[OffloadWish | None]("activation_offload", OffloadWish | None, None, touches=("passes",))
"""The field `offload`: settings of offloaded activations; None keeps all on the device."""
