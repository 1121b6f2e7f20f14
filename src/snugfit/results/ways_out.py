"""Changes of a recipe that make a step fit, and a larger GPU if there are none."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit.documents import JsonFields


@dataclass(frozen=True, kw_only=True)
class WayOut:
    """A change of the recipe with which the step fits, and its predicted memory and time."""

    recipe: str
    """The whole recipe in the notation of recipes."""

    changes: tuple[str, ...]
    """Techniques that replace some of the recipe that does not fit."""

    needed_bytes: int
    """Bytes that must be free on the device."""

    spare_bytes: int
    """Bytes of the memory that the changed recipe leaves free."""

    step_seconds: float | None
    """Seconds of the steady step; None if they are not predicted."""

    slowdown: float | None
    """Share by which the step takes longer than before; below 0 for a faster step, None without seconds."""

    fidelity: str
    """Lowest fidelity of the changes: `same`, `rounds` or `learns`."""

    tight: bool = False
    """True if the changed recipe leaves less than the headroom."""


@dataclass(frozen=True, kw_only=True)
class LargerGpu:
    """The GPU model with the least memory that a recipe fits, with its predicted figures there."""

    gpu: str
    """Short name of the GPU."""

    memory_bytes: int
    """Bytes available to processes."""

    recipe: str
    """Recipe that fits there: the given one, or else the smallest that was found."""

    needed_bytes: int
    """Bytes that must be free on the device."""

    step_seconds: float | None
    """Seconds of the steady step; None if they are not predicted."""


@dataclass(frozen=True, kw_only=True)
class WaysOut(JsonFields):
    """The cheapest changes with which a step fits."""

    ways: tuple[WayOut, ...] = ()
    """Changes, those of the recipe's fidelity first, then the least slowdown, then the fewest changes."""

    larger_gpu: LargerGpu | None = None
    """A larger GPU, if no change was found."""
