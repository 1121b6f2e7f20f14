"""Frozen weights of experts in MXFP4, unpacked into one matrix for each product.

A block of 32 numbers has one scale 2^(s - 127). A number has a sign, two bits of exponent and one of
mantissa. The source is OCP Microscaling Formats 1.0, sections 5.3.3 and 6.3. Byte i of a block has number 2i
in its low half. Values are those of transformers' `convert_moe_packed_tensors`, bit for bit.
"""

from __future__ import annotations

import torch

from snugfit.features.kernels.operations.operators import define, has_kernel

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the eight codes without a sign."""

BLOCK = 32
"""Numbers that share a scale."""

BIAS = 127
"""Offset of a scale's exponent."""

_UNPACK = define("unpack_mxfp4(Tensor blocks, Tensor scales, *, Tensor(a!) out) -> ()", "mxfp4")


def unpack(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights (..., K) of packed blocks (..., K / 32, 16) and their scales (..., K / 32)."""
    if not has_kernel(blocks):
        return reference(blocks, scales, dtype)
    whole = blocks.new_empty((*scales.shape[:-1], scales.size(-1) * BLOCK), dtype=dtype)
    _UNPACK(blocks, scales, out=whole)
    return whole


def reference(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights of `unpack`, in plain torch."""
    table = torch.tensor([*VALUES, *(-value for value in VALUES)], device=blocks.device)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    values = torch.ldexp(table[codes.long()], scales.to(torch.int32)[..., None] - BIAS)
    return values.flatten(-2).to(dtype)


class Mxfp4Weight(torch.nn.Module):
    """A parametrization by which a parameter of experts (E, K, N) is stored in MXFP4.

    Its `original` has the blocks (E, N, K / 32, 16), and this module has the scales (E, N, K / 32).
    """

    scales: torch.Tensor

    def __init__(self, scales: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("scales", scales)
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the sizes (E, N, K) of the unpacked weights."""
        experts, outputs, blocks = self.scales.shape
        return experts, outputs, blocks * BLOCK

    @torch.no_grad()
    def forward(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the unpacked parameter (E, K, N), a view of (E, N, K)."""
        return unpack(blocks, self.scales, self.dtype).transpose(1, 2)
