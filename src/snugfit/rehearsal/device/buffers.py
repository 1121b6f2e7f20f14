"""Scratch: what a kernel takes for itself, as allocations and frees in order."""

from __future__ import annotations

from typing import NamedTuple


class Buffer(NamedTuple):
    """An entry of a scratch: a buffer of so many bytes is allocated, or freed where they are negative. Of 0
    bytes are the places of the operator's own outputs."""

    name: str
    nbytes: int


Scratch = tuple[Buffer, ...]
"""Allocations and frees, in order. Where the operator's own outputs are allocated stands `OUTPUTS`, or for
each one of `ONE_OUTPUT`; they come first in a scratch that names no place for any."""

OUTPUTS = Buffer("outputs", 0)
"""The place of all outputs."""

ONE_OUTPUT = {Buffer(f"output {number}", 0): number for number in range(3)}
"""The places of the outputs one by one, and which of them each is."""


class GpuSize(NamedTuple):
    """What a kernel's scratch grows with."""

    multiprocessors: int
    threads: int
    """Resident threads of one multiprocessor."""
    capability: tuple[int, int] = (9, 0)
    """Compute capability, which decides which kernel runs."""


def output(number: int) -> Buffer:
    """The place of this one of the operator's outputs."""
    return Buffer(f"output {number}", 0)


def nest(*buffers: Buffer, during: Scratch = ()) -> Scratch:
    """Buffers that are allocated one after the other, live while something happens, and are freed in reverse
    order."""
    return (*buffers, *during, *(Buffer(name, -nbytes) for name, nbytes in reversed(buffers)))
