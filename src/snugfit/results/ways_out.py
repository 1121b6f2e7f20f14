"""Changes of a recipe that make a step fit, and a larger GPU if there are none."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit.documents import JsonFields


@dataclass(frozen=True, kw_only=True)
class WayOut:
    """A change of the recipe with which the step fits, and its predicted memory and time."""

    recipe: str
    """Whole changed recipe as text, such as `bf16 + every_layer`."""

    changes: tuple[str, ...]
    """Techniques that replace some of the techniques of the recipe that does not fit."""

    needed_bytes: int
    """Bytes that must be free on the GPU for the changed recipe."""

    spare_bytes: int
    """Bytes of the memory limit that the changed recipe leaves free."""

    step_seconds: float | None
    """Seconds of a step of the changed recipe, after the first ones; None if they are not predicted."""

    slowdown: float | None
    """Relative increase of the seconds per step by the changes; negative if the step becomes faster, None
    without seconds.
    """

    fidelity: str
    """Lowest fidelity (numerical closeness to the plain step) of the changes: `same`, `rounds` or `learns`.
    """

    tight: bool = False
    """True if the changed recipe leaves less memory free than the requested headroom."""


@dataclass(frozen=True, kw_only=True)
class LargerGpu:
    """The GPU model with the least memory that a recipe fits, with its predicted figures there."""

    gpu: str
    """Short name of the GPU, such as `H200-SXM`."""

    memory_bytes: int
    """Bytes of the GPU's memory that processes can use."""

    recipe: str
    """Recipe that fits the GPU: the given one, or else the smallest that was found."""

    needed_bytes: int
    """Bytes that must be free on the GPU for this recipe."""

    step_seconds: float | None
    """Seconds of a step of this recipe, after the first ones; None if they are not predicted."""


@dataclass(frozen=True, kw_only=True)
class WaysOut(JsonFields):
    """The cheapest changes with which a step fits."""

    ways: tuple[WayOut, ...] = ()
    """Changed recipes that fit. Those of the original fidelity come first, then the least slowdown, then the
    fewest changes.
    """

    larger_gpu: LargerGpu | None = None
    """Larger GPU on which a recipe fits, if no change was found."""
