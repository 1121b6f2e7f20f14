"""Split 32-bit numbers into two 16-bit ones in Triton: the nearest number, and the nearest remainder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

BLOCK = 1024
"""Number of elements in one kernel program (chosen)."""


@triton.jit(do_not_specialize=("scale",))  # type: ignore[untyped-decorator]
def split_elements(  # type: ignore[no-untyped-def]
    wide, added, high, low, again, scale, count, columns, wide_row, added_row, high_row, low_row, again_row,
    ADDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Triton kernel: write the parts of scale * (wide + added) for a block of elements; rows are strided."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    # Offsets of large tensors exceed 32 bits.
    row, column = (at // columns).to(tl.int64), at % columns
    value = tl.load(wide + row * wide_row + column, mask=inside, other=0.0)
    if ADDS:
        value += tl.load(added + row * added_row + column, mask=inside, other=0.0)
    value *= scale
    first = value.to(high.dtype.element_ty)
    tl.store(high + row * high_row + column, first, mask=inside)
    tl.store(
        low + row * low_row + column, (value - first.to(tl.float32)).to(low.dtype.element_ty), mask=inside
    )
    tl.store(again + row * again_row + column, first, mask=inside)


def split_halves(
    wide: torch.Tensor,
    added: torch.Tensor | None,
    scale: float,
    *,
    high: torch.Tensor,
    low: torch.Tensor,
    again: torch.Tensor,
) -> None:
    """Launch the kernel that writes the parts of scale * (wide + added), all (rows, columns)."""
    count = wide.numel()
    second = wide if added is None else added
    strides = [tensor.stride(0) for tensor in (wide, second, high, low, again)]
    split_elements[(triton.cdiv(count, BLOCK),)](
        wide, second, high, low, again, scale, count, wide.size(1), *strides, ADDS=added is not None,
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
