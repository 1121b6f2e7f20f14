"""Temporary memory of the two kernels with which FSDP2 copies gathered weights and scattered gradients.

Both kernels are one launch over many tensors. A table on the device assigns thread blocks to tensors. It has
64-bit numbers, is built in page-locked memory, and has one number per block of 128 threads. Each thread moves
16 bytes at a time (`native/cuda/TensorShape.cu`: `split_with_sizes_copy_out_cuda` and `_chunk_cat_out_cuda`).
The size is exact on two H200s for layers of 9 tensors and for an embedding with a norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from snugfit.rehearsal.device.buffers import Buffer, GpuSize, Scratch, nest

NUMBER, THREADS = 8, 128
TILE = 16 * THREADS
"""Bytes that a thread block of the copy kernel moves in one iteration."""

WAVES = 2
"""Limit of launched thread blocks, as a multiple of those that the GPU runs at once."""


def split_with_sizes_copy(arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    """Return the temporary bytes of the copy from one tensor with all ranks' parts to one tensor per weight.

    Each weight has four numbers: the addresses of its source and its target, its bytes, and the index of its
    first block.
    """
    gathered, lengths = arguments[0], arguments[1]
    dim = arguments[2] if len(arguments) > 2 else 0
    row = gathered.element_size() * gathered.stride(dim)
    nbytes = [length * row for length in lengths]
    ranks = math.prod(gathered.shape[:dim])
    at_once = gpu.multiprocessors * gpu.threads // THREADS * WAVES
    rounds = _ceil(sum(_ceil(one, TILE) for one in nbytes) * ranks, at_once)
    together = min(math.ceil(math.sqrt(rounds)), ranks)  # number of ranks' parts that a thread block copies
    blocks = sum(_ceil(one, TILE * _ceil(rounds, together)) for one in nbytes)
    return _table(blocks + 4 * len(nbytes) + 1)


def chunk_cat(arguments: Sequence[Any], out: Any, gpu: GpuSize) -> Scratch:
    """Return the temporary bytes of the copy from many gradients to one tensor with contiguous parts of the
    ranks.

    Each gradient has six numbers: the positions of its source, of its target and of its first block, and
    three sizes. Those are its bytes, the bytes of a padded part, and the blocks of one part.
    """
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


SCRATCH = {"fsdp::split_with_sizes_copy": split_with_sizes_copy, "fsdp::chunk_cat": chunk_cat}
"""Functions that return the bytes of an operator's temporary memory, by operator
(`rehearsal/device/scratch.py`).
"""
