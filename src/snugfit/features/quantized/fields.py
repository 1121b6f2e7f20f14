"""The fields that the feature `quantized` adds to `Setup` (a recipe's settings)."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit.techniques.wish import Wish

FLOAT8_MULTIPLE = 16
"""Divisor of both dimensions of a matrix in 8-bit floats (`native/cuda/ScaledBlas.cpp`)."""

MXFP4 = "mxfp4"
"""Value of `QuantizeWish.experts` for weights in blocks of 32 with a scale of 8 bits."""


@dataclass(frozen=True, kw_only=True)
class QuantizeWish:
    """Value of the field `quantize`: frozen weights of linear layers in 4 or 8 bits."""

    bits: int = 4
    """Number of bits of a weight."""

    double: bool = True
    """True if the scales of 4-bit weights are quantized too."""

    experts: bool | str = False
    """True if the weights of experts have 4 bits too, and `mxfp4` if they are those of such a file."""


@dataclass(frozen=True, kw_only=True)
class Float8Wish:
    """Value of the field `float8`: matrix products of linear layers in 8-bit floats."""

    recipe: str = "tensorwise"
    """torchao's name for the elements that share a scale: `tensorwise` for a whole matrix, `rowwise` for a
    row.
    """


QUANTIZE = Wish[QuantizeWish | None]("quantize", QuantizeWish | None, None)
"""The field `quantize`: settings of quantized weights in linear layers; None keeps `weights_dtype`."""

FLOAT8 = Wish[Float8Wish | None]("float8", Float8Wish | None, None, touches=("passes",))
"""The field `float8`: settings of linear layers whose products are computed in 8-bit floats. None computes
them in the dtype of their inputs.
"""
