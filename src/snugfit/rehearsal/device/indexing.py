"""Temporary GPU memory of kernels that gather and scatter by indices.

The rules come from torch's sources (2.11 to 2.13; each rule names its file). They match every allocation and
free in the recorded order of `tests/data/history-h200` (BERT, Llama and T5; 2,048 to 147,456 indices). The
allocations are bounded by the number of rows and do not depend on the data. Sorting and scanning are CUB's
(`sorting.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from snugfit.rehearsal.device.buffers import OUTPUTS, Buffer, GpuSize, Scratch, nest
from snugfit.rehearsal.device.sorting import INDEX, SCAN_TILE, scan_bytes, sort_bytes

SORTED_ABOVE = 3072
"""Number of indices above which embedding backward sorts the indices and does not add gradients atomically
(`native/cuda/Embedding.cu`)."""

INDICES_PER_PARTIAL = 10
"""Largest number of indices that one partial sum covers: `NROWS_PER_THREAD` of
`native/cuda/EmbeddingBackwardKernel.cu`.
"""

ATOMIC_BLOCKS = 4
"""Thread blocks per multiprocessor below which partial sums are added atomically.

The source is `MAX_ATOMIC_ACCUM_BLOCKS_PER_SM` in the same file.
"""

WARP, LARGEST_BLOCK = 32, 1024

UNIQUE_TILE = 640 * 7
"""Number of items that one thread block of CUB's `unique` processes, for sm_90 and 8-byte keys.

The source is `cub/device/dispatch/tuning`.
"""


def embedding(arguments: Sequence[Any], out: Any) -> Scratch:
    """Return the temporary buffer of an embedding: a flat copy of its indices if they are not viewable as one
    dimension. The source is `indices.reshape(-1)` in `native/Embedding.cpp`.
    """
    indices = arguments[1]
    if indices.dim() == 1 or _flat(indices):
        return ()
    return nest(Buffer("indices", _nbytes(indices)), during=(OUTPUTS,))


def _flat(tensor: Any) -> bool:
    try:
        tensor.view(-1)
    except RuntimeError:
        return False
    return True


def index(arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    """Return the temporary buffers of advanced indexing: copies of index tensors with equal shapes and
    different strides.

    The kernel requires equal strides: `AdvancedIndex`, `native/TensorAdvancedIndexing.cpp`.
    """
    import torch

    indices = [tensor for tensor in arguments[1] if tensor is not None]
    if len(indices) < 2:
        return ()
    broadcast = torch.broadcast_tensors(*indices)
    if len({tensor.stride() for tensor in broadcast}) == 1:
        return ()
    copies = (
        Buffer(f"index {n}", _nbytes(tensor))
        for n, tensor in enumerate(broadcast)
        if not tensor.is_contiguous()
    )
    return nest(*copies, during=(OUTPUTS,))


def masked_select(arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    """Return the temporary buffer of `masked_select`: the positions of the mask's true elements.

    The source is `masked_select_out_cuda_impl` in `native/cuda/IndexKernel.cpp`.
    """
    dims = max(arguments[0].dim(), arguments[1].dim(), 1)
    return nest(Buffer("where", out.numel() * dims * INDEX), during=(OUTPUTS,))


def index_put(arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    """Return the temporary buffers of `index_put`.

    Values to add (the gradient of a gather) are sorted, so that they are added in one order:
    `index_put_with_sort_kernel`, `native/cuda/Indexing.cu`. Values to write are not sorted.
    """
    operand, indices = arguments[0], [tensor for tensor in arguments[1] if tensor is not None]
    if any(str(tensor.dtype) in ("torch.bool", "torch.uint8") for tensor in indices):
        return ()  # the number of true elements depends on data
    if len(arguments) < 4 or not arguments[3]:
        return index(arguments, out, gpu)
    count, value = math.prod(_broadcast(indices)), arguments[2]
    nbytes = count * INDEX
    # Negative indices are wrapped, then all are combined into one linear index (`computeLinearIndex`).
    linear: Scratch = (Buffer("wrapped", nbytes), Buffer("linear", nbytes), Buffer("wrapped", -nbytes))
    for _ in indices[1:]:
        linear += nest(Buffer("wrapped", nbytes), Buffer("stride", nbytes))
    copies: Scratch = ()
    rows = math.prod(operand.size(dim) for dim, tensor in enumerate(arguments[1]) if tensor is not None)
    # The kernel reads values one after the other, so broadcast or strided values are copied.
    if value.numel() < count * (operand.numel() // max(rows, 1)) or not value.is_contiguous():
        copies = (Buffer("value", count * (operand.numel() // max(rows, 1)) * value.element_size()),)
    # Indexed dimensions that are not adjacent are moved to the front, with a copy of the operand.
    if not _adjacent(arguments[1]):
        copies = (*copies, Buffer("indexed first", _nbytes(operand)))
    # The sort needs only the bits of the largest row index.
    bits = max(rows - 1, 1).bit_length()
    buffers = (Buffer("sorted", nbytes), Buffer("original", nbytes), Buffer("range", nbytes))
    sorting = nest(*copies, *buffers, Buffer("sort", sort_bytes(count, INDEX, bits)))
    return (OUTPUTS, *linear, *sorting, Buffer("linear", -nbytes))


def _broadcast(indices: Sequence[Any]) -> tuple[int, ...]:
    import torch

    return tuple(torch.broadcast_shapes(*(tensor.shape for tensor in indices)))


def _adjacent(indices: Sequence[Any]) -> bool:
    dims = [dim for dim, tensor in enumerate(indices) if tensor is not None]
    return dims[-1] - dims[0] == len(dims) - 1


def embedding_backward(arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    """Return the temporary buffers of `embedding_dense_backward_cuda`, without `scale_grad_by_freq`.

    The source is `native/cuda/Embedding.cu`.
    """
    gradient, indices, rows = arguments[0], arguments[1], int(arguments[2])
    copies = tuple(
        Buffer(name, _nbytes(tensor))
        for name, tensor in (("indices", indices), ("gradient", gradient))
        if not tensor.is_contiguous()
    )
    count, item = indices.numel(), indices.element_size()
    # Few indices are added atomically, without a sort.
    if count <= SORTED_ABOVE:
        return nest(*copies, during=(OUTPUTS,))
    nbytes = count * item
    sort = nest(Buffer("range", nbytes), Buffer("sort", sort_bytes(count, item)))
    summing = _summing(count, rows, gradient, item, gpu.multiprocessors)
    buffers = (*copies, Buffer("sorted", nbytes), Buffer("original", nbytes))
    return nest(*buffers, during=(*sort, OUTPUTS, *summing))


def _summing(count: int, rows: int, gradient: Any, item: int, multiprocessors: int) -> Scratch:
    """Return the temporary buffers of the sorted sum in embedding backward, after its output.

    The function is `embedding_backward_cuda_kernel` in `native/cuda/EmbeddingBackwardKernel.cu`.
    """
    width = gradient.size(-1)
    # Sorted indices are split into runs of one row, and each run into partial runs with separate sums.
    runs = min(count, rows)
    partials = count // INDICES_PER_PARTIAL + runs
    # The threads of a row are rounded up to whole warps.
    warped = -(-width // WARP) * WARP
    blocks = -(-runs * warped // min(warped, LARGEST_BLOCK))
    # Half precision is summed in fp32.
    accumulated = 4 if gradient.element_size() < 4 else gradient.element_size()
    # Too few blocks would leave the GPU idle, so partial sums are added atomically to the gradient.
    if blocks < multiprocessors * ATOMIC_BLOCKS and partials > 4 * blocks:
        last: Scratch = (Buffer("run of a partial", partials * item),)
        # Atomic sums in half precision go to a gradient in fp32, which is cast afterwards.
        if gradient.element_size() < 4:
            last = (*last, Buffer("wide gradient", rows * width * 4))
    else:
        last = (Buffer("partial sums", partials * width * accumulated),)
    unique = nest(Buffer("unique", count * item), Buffer("scan", scan_bytes(-(-count // UNIQUE_TILE), item)))
    scan = nest(Buffer("scan", scan_bytes(-(-runs // SCAN_TILE), item)))
    inner = nest(Buffer("number of partials", 8), Buffer("partials", partials * item), *last)
    middle = nest(Buffer("sizes", runs * item), Buffer("offsets", runs * item), during=(*scan, *inner))
    starts = (Buffer("run starts", count * item), Buffer("number of runs", 8))
    return nest(*starts, during=(*unique, *middle))


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
