"""The words of scratch: what a kernel takes for itself, as births and deaths in order."""

from __future__ import annotations

Scratch = tuple[tuple[str, int], ...]
"""Births (`name, bytes`) and deaths (`name, -bytes`), in order; where its own outputs are born stands
`OUTPUTS`, or for each one of `ONE_OUTPUT`."""

OUTPUTS = ("outputs", 0)
"""The place of the operator's own outputs; they come first in a scratch that names no place for any."""


ONE_OUTPUT = {("output 0", 0): 0, ("output 1", 0): 1, ("output 2", 0): 2}
"""The places of an operator's outputs one by one, and which of them each is."""


def output(place: int) -> tuple[str, int]:
    """The place of this one of the operator's outputs."""
    return (f"output {place}", 0)


def held(buffers: Scratch, during: Scratch = ()) -> Scratch:
    """Buffers that are born one after the other, live while something happens, and die in reverse order."""
    return (*buffers, *during, *((name, -nbytes) for name, nbytes in reversed(buffers)))
