"""Temporary buffers of a kernel (scratch), as a list of allocations and frees in order."""

from __future__ import annotations

from typing import NamedTuple


class Buffer(NamedTuple):
    """One entry in the list of a kernel's temporary buffers: the allocation of `nbytes` bytes, or a free if
    `nbytes` is negative.

    An entry of 0 bytes marks the position of the operator's own outputs.
    """

    name: str
    nbytes: int


Scratch = tuple[Buffer, ...]
"""Type of a list of a kernel's temporary buffers: their allocations and frees in order. `OUTPUTS` marks the
position at which the operator's outputs are allocated, and a key of `ONE_OUTPUT` that of a single output.
Without such a marker, outputs are allocated first.
"""

OUTPUTS = Buffer("outputs", 0)
"""Entry that marks the position at which all outputs of an operator are allocated."""

ONE_OUTPUT = {Buffer(f"output {number}", 0): number for number in range(3)}
"""Entries that mark the position at which a single output is allocated, each with the output's index."""


class GpuSize(NamedTuple):
    """Properties of a GPU that determine the sizes of kernels' temporary buffers."""

    multiprocessors: int
    threads: int
    """Number of threads that one multiprocessor can have resident at a time."""
    capability: tuple[int, int] = (9, 0)
    """CUDA compute capability (major, minor), on which the kernel choice depends."""


def output(number: int) -> Buffer:
    """Return an entry that marks the position of an operator's output among its temporary buffers."""
    return Buffer(f"output {number}", 0)


def nest(*buffers: Buffer, during: Scratch = ()) -> Scratch:
    """Return the entries of nested buffers: allocated in order, live during other entries, freed in reverse
    order.
    """
    return (*buffers, *during, *(Buffer(name, -nbytes) for name, nbytes in reversed(buffers)))
