"""The words of scratch: what a kernel takes for itself, as births and deaths in order."""

from __future__ import annotations

Scratch = tuple[tuple[str, int], ...]
"""Births (`name, bytes`) and deaths (`name, -bytes`), in order; `OUTPUTS` where its own are born."""

OUTPUTS = ("outputs", 0)
"""The place of the operator's own outputs; they come first in a scratch that does not name it."""


def held(buffers: Scratch, during: Scratch = ()) -> Scratch:
    """Buffers that are born one after the other, live while something happens, and die in reverse order."""
    return (*buffers, *during, *((name, -nbytes) for name, nbytes in reversed(buffers)))
