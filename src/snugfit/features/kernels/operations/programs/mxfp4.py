"""Kernel of weights in MXFP4 in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

BYTES = 1024
"""Packed bytes that a kernel program unpacks (chosen)."""

BYTES_OF_BLOCK = tl.constexpr(16)
WARPS = 4


@triton.jit
def decode(code, half):  # type: ignore[no-untyped-def]
    """Return the value of a code of four bits, times twice the half of its scale."""
    exponent = (code >> 1) & 3
    mantissa = (code & 1).to(tl.float32)
    doubled = tl.where(exponent == 0, mantissa, (mantissa * 0.5 + 1.0) * (1 << exponent).to(tl.float32))
    return tl.where(code > 7, -doubled, doubled) * half


@triton.jit  # type: ignore[untyped-decorator]
def unpack_mxfp4_bytes(blocks, scales, out, count, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Triton kernel: unpack some bytes with two numbers each."""
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    mask = at < count
    packed = tl.load(blocks + at, mask=mask, other=0).to(tl.int32)
    scale = tl.load(scales + at // BYTES_OF_BLOCK, mask=mask, other=127).to(tl.int32)
    # Half of the scale never overflows: 2^-128 and 2^-127 are subnormal, others are an exponent's bits.
    half = tl.where(scale < 2, (1 << 21) << scale, (scale - 1) << 23).to(tl.float32, bitcast=True)
    values = tl.interleave(decode(packed & 15, half), decode(packed >> 4, half))
    places = tl.program_id(0).to(tl.int64) * (2 * BYTES) + tl.arange(0, 2 * BYTES)
    tl.store(out + places, values.to(out.dtype.element_ty), mask=places < 2 * count)


def unpack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, *, out: torch.Tensor) -> None:
    """Launch the kernel of `unpack`. All tensors are contiguous."""
    grid = (triton.cdiv(blocks.numel(), BYTES),)
    unpack_mxfp4_bytes[grid](blocks, scales, out, blocks.numel(), BYTES=BYTES, num_warps=WARPS)
