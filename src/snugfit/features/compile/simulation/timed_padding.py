"""The simulated memory of Inductor's padding benchmarks (`fx_passes/pad_mm.py`).

For a matrix product with sizes that are no multiple of 16 bytes, Inductor creates operands on the GPU. It
runs the product with and without padding, once and then repeatedly. The memory is freed after the benchmark.
But cuBLAS has then allocated its workspaces, and the allocator keeps segments that activations use later. An
H100 (torch 2.11) showed this for 18 products of a ViT with adapters in fp32. It also showed it for 18 of a T5
in fp16.
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
    """Layout of a matrix or of a batch of matrices."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    written_padded: bool
    """True if the kernel that writes the operand can write it with padding, so that padding takes no time."""


class PaddedProduct(NamedTuple):
    """A matrix product, with its operands' layouts, that Inductor benchmarks with and without padding."""

    key: str
    """Key of Inductor's decision about the padding, in its cache."""
    key_unpadded: str
    """Key of the measured time without padding, in Inductor's cache."""
    operator: str
    first: Operand
    second: Operand
    added: Operand | None


def product_of(
    match: Any, first: torch.Tensor, second: torch.Tensor, operator: Any, added: Any
) -> PaddedProduct:
    """Return the matrix product that a graph pass has matched, for a benchmark of padding."""
    from torch._inductor.fx_passes import pad_mm

    def describe(tensor: torch.Tensor, name: str = "") -> Operand:
        padded = bool(name) and bool(pad_mm.should_exclude_padding_time(match, name))
        return Operand(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, padded)

    arguments = match, first, second, operator, added
    return PaddedProduct(
        pad_mm.should_pad_bench_key(*arguments),
        pad_mm.should_pad_bench_key(*arguments, is_base_time_key=True),
        operator.__name__,
        describe(first, "mat1"),
        describe(second, "mat2"),
        None if added is None else describe(added),
    )


def time_padding(policy: Policy, products: Iterable[PaddedProduct], timed: set[str]) -> None:
    """Allocate and free the memory of these products' benchmarks on this GPU, except products in `timed`,
    which were benchmarked before.
    """
    import torch

    flushed = getattr(policy, "cache_bytes", 0)
    if not flushed or not times_anything():
        return
    # Inductor benchmarks outside of the model's autocast, which would cast the operands.
    with torch.no_grad(), torch._C._DisableAutocast():
        for product in products:
            # Inductor intends to skip products that are limited by memory, but confuses MHz and kHz and
            # benchmarks all.
            if product.key not in timed:
                _time(product, flushed, as_it_is=product.key_unpadded not in timed)
                timed |= {product.key, product.key_unpadded}


def _time(product: PaddedProduct, flushed: int, *, as_it_is: bool) -> None:
    """Allocate and free memory as Inductor's `_should_pad` does, in its order: operands, padded operands,
    both products.
    """
    first, second = _make(product.first), _make(product.second)
    added = None if product.added is None or not as_it_is else _make(product.added)
    rows, inner, columns = _padding(first, second)
    # If a kernel can write an operand with padding, the benchmark gets it padded.
    first_padded = _pad(first, rows, inner) if product.first.written_padded else first
    second_padded = _pad(second, inner, columns) if product.second.written_padded else second
    added_padded = None if product.added is None else _make(product.added)

    def run_padded() -> torch.Tensor:
        first, other, third = first_padded, second_padded, added_padded
        if not product.first.written_padded:
            first = _pad(first, rows, inner)
        if not product.second.written_padded:
            other = _pad(other, inner, columns)
        if third is not None:
            third = _pad_sum(third, rows, columns)
        return _multiply(product.operator, first, other, third)

    if as_it_is:
        _run_twice(functools.partial(_multiply, product.operator, first, second, added), flushed)
    _run_twice(run_padded, flushed)
    del run_padded, second, first  # Inductor frees them in this order.


def _run_twice(run: Callable[[], torch.Tensor], flushed: int) -> None:
    import torch

    run()
    # Before each repetition, Inductor writes a buffer as large as the GPU's cache to flush it.
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
    """Return a tensor of this layout on `meta`, in a storage of the size that its strides need."""
    import torch

    # A storage ends with its last element, even if the strides leave gaps.
    spans = sum((size - 1) * step for size, step in zip(like.shape, like.stride, strict=True)) + 1
    return torch.empty(spans, dtype=like.dtype, device="meta").as_strided(like.shape, like.stride)


def _padding(first: torch.Tensor, second: torch.Tensor) -> tuple[int, int, int]:
    """Return the padding of a product in rows, inner dimension and columns."""
    from torch._inductor.fx_passes import pad_mm

    align = pad_mm.get_alignment_size(first)
    (rows, inner), columns = first.shape[-2:], second.shape[-1]
    lengths = [pad_mm.get_padded_length(size, align) for size in (rows, inner, columns)]
    return lengths[0], lengths[1], lengths[2]


def _pad(matrix: torch.Tensor, below: int, beside: int) -> torch.Tensor:
    import torch

    return torch.constant_pad_nd(matrix, [0, beside, 0, below]) if below or beside else matrix


def _pad_sum(added: torch.Tensor, below: int, beside: int) -> torch.Tensor:
    """Return the tensor added to a padded product, padded too. A tensor of one dimension is a row (as in
    `pad_addmm`).
    """
    import torch

    widths = {added.dim() - 1: beside, added.dim() - 2: below}
    for dim, width in widths.items():
        if dim >= 0 and width and added.shape[dim] != 1:
            more = added.new_zeros([*added.shape[:dim], width, *added.shape[dim + 1 :]])
            added = torch.cat([added, more], dim)
    return added
