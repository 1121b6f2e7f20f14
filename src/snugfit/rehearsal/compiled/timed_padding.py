"""What Inductor takes while it compiles, to time products as they are and padded (`fx_passes/pad_mm.py`).

Of a product with sizes that are no multiple of 16 bytes it makes operands on the GPU, and runs it as it is
and padded: once, and then again and again beside a buffer as large as the GPU's cache, which it writes to
flush that. All of this is gone when the product has been timed; but the workspaces of cuBLAS begin here, and
segments are left that activations fill later. An H100 (torch 2.11) showed it so for 18 products of a ViT with
adapters in fp32 and 18 of a T5 in fp16.

Inductor says that it times products only that the GPU's arithmetic bounds. It compares with a clock in MHz
that is taken for kHz (`is_mm_compute_bound`, `torch._utils_internal.max_clock_rate`), so it times them all:
on that H100, one with 7.8 multiplications for each element too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.rehearsal.record.first_launches import times_anything

if TYPE_CHECKING:
    import torch

    from snugfit.rehearsal.device.policy import Policy


class Operand(NamedTuple):
    """How a matrix, or a batch of them, lies."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    written_padded: bool
    """Whether the kernel that writes it would write it padded, so that this takes no time."""


class PaddedProduct(NamedTuple):
    """A product that is timed."""

    key: str
    """Under which Inductor remembers what it decided."""
    key_unpadded: str
    """Under which it remembers how long the product takes as it is."""
    operator: str
    first: Operand
    second: Operand
    added: Operand | None


def product_of(
    match: Any, first: torch.Tensor, second: torch.Tensor, operator: Any, added: Any
) -> PaddedProduct:
    """The product that a pass has found."""
    from torch._inductor.fx_passes import pad_mm

    def describe(tensor: torch.Tensor, name: str = "") -> Operand:
        padded = bool(name) and bool(pad_mm.should_exclude_padding_time(match, name))
        return Operand(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, padded)

    asked = match, first, second, operator, added
    return PaddedProduct(
        pad_mm.should_pad_bench_key(*asked),
        pad_mm.should_pad_bench_key(*asked, is_base_time_key=True),
        operator.__name__,
        describe(first, "mat1"),
        describe(second, "mat2"),
        None if added is None else describe(added),
    )


def time_padding(policy: Policy, products: Iterable[PaddedProduct], timed: set[str]) -> None:
    """Allocates and drops what timing these takes on this GPU, but for those that are `timed` already."""
    import torch

    flushed = getattr(policy, "cache_bytes", 0)
    if not flushed or not times_anything():
        return
    with torch.no_grad(), torch._C._DisableAutocast():
        for product in products:
            if product.key not in timed:
                _time(product, flushed, as_it_is=product.key_unpadded not in timed)
                timed |= {product.key, product.key_unpadded}


def _time(product: PaddedProduct, flushed: int, *, as_it_is: bool) -> None:
    """The order of `_should_pad`: operands, those that are written padded, and both products."""
    first, second = _make(product.first), _make(product.second)
    added = None if product.added is None or not as_it_is else _make(product.added)
    rows, inner, columns = _padding(first, second)
    first_padded = _pad(first, rows, inner) if product.first.written_padded else first
    second_padded = _pad(second, inner, columns) if product.second.written_padded else second
    added_padded = None if product.added is None else _make(product.added)

    def run_padded() -> torch.Tensor:
        one, other, third = first_padded, second_padded, added_padded
        if not product.first.written_padded:
            one = _pad(one, rows, inner)
        if not product.second.written_padded:
            other = _pad(other, inner, columns)
        if third is not None:
            third = _pad_sum(third, rows, columns)
        return _multiply(product.operator, one, other, third)

    if as_it_is:
        _run_twice(functools.partial(_multiply, product.operator, first, second, added), flushed)
    _run_twice(run_padded, flushed)
    del run_padded, second, first  # in the order in which they were recorded to be gone


def _run_twice(run: Callable[[], torch.Tensor], flushed: int) -> None:
    import torch

    run()
    beside = torch.empty(flushed, dtype=torch.uint8, device="meta")
    run()
    del beside


def _multiply(
    operator: str, first: torch.Tensor, second: torch.Tensor, added: torch.Tensor | None
) -> torch.Tensor:
    import torch

    if added is not None:
        return torch.addmm(added, first, second)
    return torch.bmm(first, second) if operator == "bmm" else torch.mm(first, second)


def _make(like: Operand) -> torch.Tensor:
    """One that lies so, of as many numbers as it spans (`realize_tensor`)."""
    import torch

    spans = sum((size - 1) * step for size, step in zip(like.shape, like.stride, strict=True)) + 1
    return torch.empty(spans, dtype=like.dtype, device="meta").as_strided(like.shape, like.stride)


def _padding(first: torch.Tensor, second: torch.Tensor) -> tuple[int, int, int]:
    """By how many rows, inner numbers and columns a product is padded."""
    from torch._inductor.fx_passes import pad_mm

    align = pad_mm.get_alignment_size(first)
    (rows, inner), columns = first.shape[-2:], second.shape[-1]
    lengths = [pad_mm.get_padded_length(size, align) for size in (rows, inner, columns)]
    return lengths[0], lengths[1], lengths[2]


def _pad(matrix: torch.Tensor, below: int, beside: int) -> torch.Tensor:
    import torch

    return torch.constant_pad_nd(matrix, [0, beside, 0, below]) if below or beside else matrix


def _pad_sum(added: torch.Tensor, below: int, beside: int) -> torch.Tensor:
    """What is added: of one dimension a row (`pad_dim` of `pad_addmm`)."""
    import torch

    widths = {added.dim() - 1: beside, added.dim() - 2: below}
    for dim, width in widths.items():
        if dim >= 0 and width and added.shape[dim] != 1:
            more = added.new_zeros([*added.shape[:dim], width, *added.shape[dim + 1 :]])
            added = torch.cat([added, more], dim)
    return added
