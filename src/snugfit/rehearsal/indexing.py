"""What gathering and scattering by indices allocate for themselves.

The rules were read in torch's sources (2.11 to 2.13; the file stands with each), and give every birth and
death in the recorded order of `tests/data/history-h200` (BERT, Llama and T5; 2,048 to 147,456 indices).

Embedding backward adds atomically up to 3,072 indices. Above, it sorts them, cuts runs of one row into
partial runs of at most ten indices, and sums partial runs: each in a row of its own that is summed again, or
atomically into the gradient where the two-pass way would leave the GPU idle. What it allocates is bounded by
the number of rows and does not depend on the data. Sorting and scanning are CUB's; the sizes of its tiles are
those tuned for sm_90 and 8-byte keys, and move a few KiB on other GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from snugfit.rehearsal.buffers import OUTPUTS, Scratch, held

SORTED_ABOVE = 3072
"""Indices above which embedding backward sorts instead of adding atomically (`native/cuda/Embedding.cu`)."""

INDICES_PER_PARTIAL = 10
"""`NROWS_PER_THREAD` of `native/cuda/EmbeddingBackwardKernel.cu`."""

ATOMIC_BLOCKS = 4
"""Blocks a multiprocessor below which partial runs are summed atomically
(`MAX_ATOMIC_ACCUM_BLOCKS_PER_SM`, same file)."""

WARP, LARGEST_BLOCK = 32, 1024

SORT_TILE, UNIQUE_TILE, SCAN_TILE = 384 * 12, 640 * 7, 128 * 15
"""Items a thread block of CUB works on, sm_90 and 8-byte keys: `cub/device/dispatch/tuning`. That of scans is
CUB's oldest and only bounds a few hundred bytes."""


def embedding(arguments: Sequence[Any], out: Any) -> Scratch:
    """Indices that are no flat range are copied first: `indices.reshape(-1)` in `native/Embedding.cpp`."""
    indices = arguments[1]
    if indices.dim() == 1 or _flat(indices):
        return ()
    return held((("indices", _nbytes(indices)),), (OUTPUTS,))


def _flat(tensor: Any) -> bool:
    try:
        tensor.view(-1)
    except RuntimeError:
        return False
    return True


def index(arguments: Sequence[Any], out: Any, sizes: tuple[int, int]) -> Scratch:
    """Several indices of one shape but different strides are each copied, so that the kernel finds them
    alike: `AdvancedIndex`, `native/TensorAdvancedIndexing.cpp`."""
    import torch

    indices = [one for one in arguments[1] if one is not None]
    if len(indices) < 2:
        return ()
    alike = torch.broadcast_tensors(*indices)
    if len({one.stride() for one in alike}) == 1:
        return ()
    copies = ((f"index {place}", _nbytes(one)) for place, one in enumerate(alike) if not one.is_contiguous())
    return held(tuple(copies), (OUTPUTS,))


def embedding_backward(arguments: Sequence[Any], out: Any, sizes: tuple[int, int]) -> Scratch:
    """`embedding_dense_backward_cuda` (`native/cuda/Embedding.cu`) without `scale_grad_by_freq`."""
    gradient, indices, rows = arguments[0], arguments[1], int(arguments[2])
    copies = tuple(
        (name, _nbytes(tensor))
        for name, tensor in (("indices", indices), ("gradient", gradient))
        if not tensor.is_contiguous()
    )
    count, item = indices.numel(), indices.element_size()
    if count <= SORTED_ABOVE:
        return held(copies, (OUTPUTS,))
    each = count * item
    sort = held((("range", each), ("sort", sort_bytes(count, item))))
    summing = _summing(count, rows, gradient, item, sizes[0])
    return held((*copies, ("sorted", each), ("original", each)), (*sort, OUTPUTS, *summing))


def _summing(count: int, rows: int, gradient: Any, item: int, multiprocessors: int) -> Scratch:
    """`embedding_backward_cuda_kernel` (`native/cuda/EmbeddingBackwardKernel.cu`), after its output."""
    width = gradient.size(-1)
    runs = min(count, rows)
    partials = count // INDICES_PER_PARTIAL + runs
    warped = -(-width // WARP) * WARP
    blocks = -(-runs * warped // min(warped, LARGEST_BLOCK))
    accumulated = 4 if gradient.element_size() < 4 else gradient.element_size()
    if blocks < multiprocessors * ATOMIC_BLOCKS and partials > 4 * blocks:
        last: Scratch = (("run of a partial", partials * item),)
        if gradient.element_size() < 4:
            last = (*last, ("wide gradient", rows * width * 4))
    else:
        last = (("partial sums", partials * width * accumulated),)
    unique = held((("unique", count * item), ("scan", scan_bytes(-(-count // UNIQUE_TILE)))))
    scan = held((("scan", scan_bytes(-(-runs // SCAN_TILE))),))
    inner = held((("number of partials", 8), ("partials", partials * item), *last))
    middle = held((("sizes", runs * item), ("offsets", runs * item)), (*scan, *inner))
    return held((("run starts", count * item), ("number of runs", 8)), (*unique, *middle))


def sort_bytes(count: int, item: int) -> int:
    """CUB's buffers for sorting pairs of `item`-byte keys and values: bins, look-back, the other key and
    value buffer, counters (`InvokeOnesweep`, `cub/device/dispatch/dispatch_radix_sort.cuh`)."""
    passes = item  # of eight bits each
    return _aliased(
        passes * 256 * 8, -(-count // SORT_TILE) * 256 * 4, count * item, count * item, passes * 4
    )


def scan_bytes(tiles: int) -> int:
    """CUB's state of a scan over 8-byte values: one 16-byte word a tile and 32 of padding (`ScanTileState`,
    `cub/agent/single_pass_scan_operators.cuh`)."""
    return _aliased(_aliased((32 + tiles) * 16))


def _aliased(*sizes: int) -> int:
    """Several buffers in one, each at a multiple of 256 B, in memory that may start anywhere
    (`AliasTemporaries`, `cub/util_device.cuh`)."""
    return sum(-(-size // 256) * 256 for size in sizes) + 255


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
