"""Temporary GPU memory of sorts and scans (cumulative sums), in torch's kernels and in CUB.

The rules come from torch's sources (`native/cuda/Sort.cpp`, `SortStable.cu`, `ScanUtils.cuh`) and CUB's
(`cub/device/dispatch`). They were compared with allocations recorded on an H200. The recorded sorts have
1,854 indices (small tiles) and 2,048 to 147,456 (radix). The recorded scans have 4 to 14,745 numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from snugfit.rehearsal.device.buffers import OUTPUTS, Buffer, GpuSize, Scratch, nest

SMALL_SORT = 4096
"""Number of elements of a row up to which one thread block sorts it in place (`should_use_small_sort`)."""

FEW_ROWS, LONG_ROW = 128, 1_000_000
"""Number of rows below which all rows are sorted in one call, and row length from which each is sorted alone.

The source is torch's `do_launch_stable_sort_kernel`.
"""

INDEX = 8
"""Bytes of an int64 index."""

# CUB tuned these sizes for sm_90 and 8-byte keys. On other GPUs, buffers change by a few KiB.
SINGLE_TILE, SORT_TILE, SCAN_TILE = 256 * 9, 384 * 12, 128 * 15
"""Items per thread block of the sorts and scans of CUB (CUDA's library of primitives). The tile of scans is
CUB's oldest, and changes a size by a few hundred bytes only.
"""


def sort(arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    """Return the temporary buffers of a sort (`sort_cuda_kernel`): a range of indices for short rows, or
    those of CUB's radix sort.
    """
    operand, dims = arguments[0], [argument for argument in arguments[1:] if type(argument) is int]
    if not operand.numel() or not operand.dim():
        return ()
    dim = dims[0] if dims else -1
    length = operand.size(dim)
    if length <= SMALL_SORT:
        return (OUTPUTS, *nest(Buffer("range", length * INDEX)))
    count, key, rows = operand.numel(), operand.element_size(), operand.numel() // length
    copies: Scratch = ()
    # Only rows with adjacent elements can be sorted; others are copied, with values and indices.
    if operand.stride(dim) != 1:
        keys = Buffer("operand", count * key), Buffer("values", count * key)
        copies = (*keys, Buffer("indices", count * INDEX))
    if rows == 1 or length >= LONG_ROW:
        sorting = nest(Buffer("range", length * INDEX), Buffer("sort", sort_bytes(length, key)))
    elif rows < FEW_ROWS:
        pairs = (Buffer("pairs", count * INDEX), Buffer("sorted pairs", count * INDEX))
        sorting = nest(*pairs, Buffer("keys", count * key), Buffer("sort", sort_bytes(count, key)))
    else:
        sorting = nest(
            Buffer("range", count * INDEX), Buffer("sort", _one_buffer(count * key, count * INDEX))
        )
    return (OUTPUTS, *nest(*copies, during=sorting))


def scan(operand: Any, out: Any) -> Scratch:
    """Return the temporary buffer of a scan, such as `cumsum`: the state of CUB's algorithm. Only
    one-dimensional operands need it (`scan_dim`).
    """
    if out.numel() < 1 or max(out.shape, default=0) != out.numel():
        return ()
    return nest(Buffer("scan", scan_bytes(-(-out.numel() // SCAN_TILE), out.element_size())))


def sort_bytes(count: int, key: int, bits: int = 0) -> int:
    """Return the bytes of CUB's buffers for a sort of `key`-byte keys and 8-byte values.

    The sort uses all bits or the lowest `bits`. The buffers are those of bins, look-back, a second copy of
    keys and values, and counters (`InvokeOnesweep`, `cub/device/dispatch/dispatch_radix_sort.cuh`). A single
    tile needs none, and requests one byte.
    """
    if count <= SINGLE_TILE:
        return 1
    # Radix sort takes 8 bits per pass.
    passes = -(-(bits or 8 * key) // 8)
    other = (count * key, count * INDEX) if passes > 1 else ()
    return _one_buffer(passes * 256 * 8, -(-count // SORT_TILE) * 256 * 4, *other, passes * 4)


def scan_bytes(tiles: int, item: int) -> int:
    """Return the bytes of the state of CUB's scan over this number of tiles.

    It has a word of twice the value's size per tile, and 32 words of padding (`ScanTileState`,
    `cub/agent/single_pass_scan_operators.cuh`).
    """
    return _one_buffer(_one_buffer((32 + tiles) * 2 * item))


def _one_buffer(*sizes: int) -> int:
    """Return the bytes of several buffers in one, each at a multiple of 256 bytes, at any start address.

    The source is `AliasTemporaries` in `cub/util_device.cuh`.
    """
    return sum(-(-size // 256) * 256 for size in sizes) + 255
