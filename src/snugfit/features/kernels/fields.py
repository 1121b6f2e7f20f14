"""The fields that the feature `kernels` adds to `Setup` (a recipe's settings)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from snugfit.techniques.wish import Wish


@dataclass(frozen=True, kw_only=True)
class FusedWish:
    """Settings for snugfit's fused kernels in a model's modules: the value of the field `fused`."""

    recomputed_mlps: int = 0
    """Number of gated MLPs, from the first layer on, whose product of gate and up is recomputed in the
    backward pass.
    """
    mlp_tokens: int | None = None
    """Number of tokens for which a gated MLP is computed at a time; None computes all at once."""


@dataclass(frozen=True, kw_only=True)
class LigerWish:
    """Settings for Liger's kernels in a model's modules: the value of the field `liger`."""

    parts: Mapping[str, bool] = field(default_factory=dict)
    """Liger's kernels that are switched on (True) or off (False), by name. Liger's default decides for the
    others.
    """


FUSED = Wish[FusedWish | None](
    "fused_kernels",
    FusedWish | None,
    None,
    touches=("passes",),
    packages=("triton", "snugfit.features.kernels"),  # as for Liger: the packages that take time at start-up
    seeded_models=("bert", "distilbert", "electra", "roberta"),
)
"""The field `fused`: settings of snugfit's kernels in the model's modules; None leaves modules unchanged."""

LIGER = Wish[LigerWish | None](
    "liger_kernels", LigerWish | None, None, touches=("passes",), packages=("triton", "liger_kernel")
)
"""The field `liger`: settings of Liger's kernels in the model's modules; None leaves modules unchanged."""
