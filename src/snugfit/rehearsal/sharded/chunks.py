"""Scratch of the two kernels by which FSDP2 copies what it gathers and what it scatters.

Both are one launch over many tensors, told on the device which block of threads works on which tensor: a
table of 64-bit numbers, in page-locked memory first, with one number for each block of 128 threads, each of
which moves 16 bytes at a time (`native/cuda/TensorShape.cu`: `split_with_sizes_copy_out_cuda` and
`_chunk_cat_out_cuda`). Exact on two H200s for layers of 9 tensors and for an embedding with a norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from snugfit.rehearsal.device.buffers import Buffer, GpuSize, Scratch, nest

NUMBER, THREADS = 8, 128
TILE = 16 * THREADS
"""Bytes that a block of threads moves in one go."""

WAVES = 2
"""How many blocks are launched for each that the GPU holds at once, at most."""


def split_with_sizes_copy(arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    """Of one tensor that all ranks' parts lie in, one after the other, to a tensor for each weight. Numbers:
    where each is read and written, its bytes, and where its blocks begin."""
    gathered, lengths = arguments[0], arguments[1]
    dim = arguments[2] if len(arguments) > 2 else 0
    row = gathered.element_size() * gathered.stride(dim)
    nbytes = [length * row for length in lengths]
    ranks = math.prod(gathered.shape[:dim])
    at_once = gpu.multiprocessors * gpu.threads // THREADS * WAVES
    rounds = _ceil(sum(_ceil(one, TILE) for one in nbytes) * ranks, at_once)
    together = min(math.ceil(math.sqrt(rounds)), ranks)  # ranks' parts that a block copies
    blocks = sum(_ceil(one, TILE * _ceil(rounds, together)) for one in nbytes)
    return _table(blocks + 4 * len(nbytes) + 1)


def chunk_cat(arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    """Of many gradients to one tensor, in which the part of each rank lies in one piece. Numbers: where each
    is read, where it and its blocks begin, its bytes, those of a padded part and the blocks of one."""
    gradients, dim, ranks = arguments[:3]
    blocks = 0
    for gradient in gradients:
        rest = math.prod(gradient.shape[dim + 1 :])
        blocks += _ceil(_ceil(gradient.size(dim), ranks) * rest * out.element_size(), TILE)
    return _table(blocks + 6 * len(gradients) + 2)


def _table(numbers: int) -> Scratch:
    return nest(Buffer("table of blocks", NUMBER * numbers))


def _ceil(whole: int, part: int) -> int:
    return -(-whole // part)
