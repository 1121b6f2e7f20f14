"""What a long reduction allocates for itself: partial results of its thread blocks, and their semaphores.

Sums and norms over rows (gradients of biases; what a factored optimizer keeps of a matrix) are split over
thread blocks when each thread would have many values to take in: `setReduceConfig` and `gpu_reduce_kernel` of
`native/cuda/Reduce.cuh`. The buffer can be twice the matrix.

An operand whose bytes no 32-bit number counts is cut in halves (`TensorIterator::with_32bit_indexing`), which
are reduced one after the other, each with a buffer of its own. What an H200 reserved for Adafactor over an
embedding (256,000 x 2,176 in fp32) says so to the byte: 133 MiB for the norms of its columns, and not 266.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from snugfit.rehearsal.device.buffers import Buffer, GpuSize, Scratch, nest

MOST_BYTES = 2**31 - 1
"""Bytes of an operand that one kernel reduces."""

MOST_THREADS = 512
"""Threads of a block."""

FEW, MANY = 16, 256
"""Values that a thread should have at least, when its output is split over thread blocks, and at most."""

ACCUMULATED = 4
"""Bytes of a partial result: sums are kept in fp32."""


def dimensions(arguments: Sequence[Any]) -> Sequence[int]:
    """The dimensions that the first of these arguments names; none means all."""
    over = arguments[0] if arguments else None
    return [over] if isinstance(over, int) else over or ()


def partial(
    operand: Any, over: Sequence[int], out: Any, gpu: GpuSize, *, accumulated: int = ACCUMULATED
) -> Scratch:
    """The buffers of reducing `operand` to `out`; `over` are the reduced dimensions, all where
    none is named, and `accumulated` the bytes of a partial result."""
    results, inputs = out.numel(), operand.numel()
    if results in (0, inputs):
        return ()
    dims = {dim % operand.dim() for dim in over or range(operand.dim())}
    strides = [
        (operand.stride(dim), dim)
        for dim in range(operand.dim())
        if operand.size(dim) > 1 and operand.stride(dim) > 0
    ]
    if not strides:
        return ()
    inner = min(strides)[1] in dims
    buffers: Scratch = ()
    pieces = list(_pieces(operand.shape, operand.stride(), operand.element_size()))
    for shape in pieces:
        outputs = math.prod(size for dim, size in enumerate(shape) if dim not in dims)
        needs = reduction(math.prod(shape) // outputs, outputs, inner, gpu)
        if needs is not None:
            partials = needs.partials // ACCUMULATED * accumulated
            buffers += nest(Buffer("partial sums", partials), Buffer("semaphores", needs.semaphores))
    if len(pieces) > 1 and out.element_size() == operand.element_size() == 2:
        return nest(Buffer("accumulated", results * ACCUMULATED), during=buffers)
    return buffers


def _pieces(shape: Sequence[int], strides: Sequence[int], item: int) -> Iterator[tuple[int, ...]]:
    """The shape, or its halves along the dimension that reaches farthest, until each is small enough."""
    reach = [(size - 1) * stride * item for size, stride in zip(shape, strides, strict=True)]
    if sum(reach) < MOST_BYTES:
        yield tuple(shape)
        return
    farthest = max(range(len(reach)), key=lambda dim: reach[dim])
    half = shape[farthest] // 2
    for size in (half, shape[farthest] - half):
        yield from _pieces((*shape[:farthest], size, *shape[farthest + 1 :]), strides, item)


class ReductionBytes(NamedTuple):
    """Bytes of the buffers that one reduction takes."""

    partials: int
    """Partial results of its thread blocks."""
    semaphores: int


def reduction(inputs: int, outputs: int, inner: bool, gpu: GpuSize) -> ReductionBytes | None:
    """The buffers for reducing `inputs` values to each of `outputs`; None when one block an output is enough.

    `inner` says that the reduced dimension is the fastest moving one. Source: `setReduceConfig`,
    `ReduceConfig::global_memory_size`, Reduce.cuh.
    """
    vector = 4
    if inner:
        vector, dim0, dim1 = 1, inputs, outputs
    else:
        while vector > 1 and outputs % vector:
            vector //= 2
        dim0, dim1 = outputs // vector, inputs
    most = MOST_THREADS // vector
    power0, power1 = min(_power(dim0), most), min(_power(dim1), most)
    width = min(power0, 32)
    height = min(power1, most // width)
    width = min(power0, most // height)
    step_in, step_out = (width, 1) if inner else (1, width)
    per_thread = -(-inputs // step_in)
    tall = per_thread >= height * FEW or per_thread >= MANY
    if tall:
        step_in *= height
    else:
        step_out *= height
    per_thread = -(-inputs // step_in)
    grid = -(-(outputs // vector) // step_out)
    target = gpu.multiprocessors * (gpu.threads // (width * height))
    if not (tall and per_thread >= MANY and grid <= target):
        return None
    blocks = max(min(-(-target // grid), -(-per_thread // FEW)), -(-per_thread // MANY))
    if blocks <= 1:
        return None
    size = ACCUMULATED * outputs * blocks * (1 if inner else width * vector)
    return ReductionBytes(size, 4 * grid)


def _power(number: int) -> int:
    """The largest power of two that is not above `number`."""
    return 1 << (max(number, 1).bit_length() - 1)
