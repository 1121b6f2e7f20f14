"""Predicted bytes and seconds of a recipe on one GPU: lower bounds or exact values."""

from __future__ import annotations

from typing import NamedTuple


class BelowLowerBound(Exception):
    """Error: a simulated recipe took fewer bytes or seconds than its lower bound. Earlier exclusions of
    recipes may then be wrong.
    """


class Bound(NamedTuple):
    """Lower bound of a recipe's memory in bytes and of its step in seconds on one GPU."""

    needed_bytes: int
    """Lower bound of the GPU memory that must be free: peak of allocated bytes, plus those of the CUDA
    context.
    """
    seconds: float
    """Lower bound of the seconds of a step, plus its share of the run's start-up."""
    resting_bytes: int = 0
    """Lower bound of the peak bytes during the optimizer update, which activation checkpointing does not
    change.
    """
    layers_bytes: int = 0
    """Lower bound of the peak bytes during the update or while a layer runs. Computing the loss in chunks
    does not change them.
    """
    unkept_bytes: int = 0
    """Lower bound of the peak bytes if no layer kept activations for the backward pass."""
    device_seconds: float = 0.0
    """Lower bound of the seconds of a step in which the GPU runs kernels; 0 if unknown."""
    gradient_bytes: int = 0
    """Bytes of all gradients at the end of the backward pass."""
    outside_bytes: int = 0
    """Lower bound of the peak bytes while no layer runs, without the activations of layers that are not
    recomputed.
    """
    compiled_bytes: int = 0
    """Lower bound of the peak bytes if the layers are compiled."""
    compiled_seconds: float = 0.0
    """Seconds of the kernels that compilation does not fuse, such as matrix products; 0 if unknown."""

    def at_least(self, other: Bound) -> Bound:
        """Return a bound with the larger bytes and the larger seconds of two bounds."""
        return Bound(max(self.needed_bytes, other.needed_bytes), max(self.seconds, other.seconds))


class Figures(NamedTuple):
    """Exactly simulated memory in bytes and seconds per step of a recipe on one GPU."""

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    context_bytes: int
    seconds: float
    """Seconds of a step plus its share of the run's start-up. Recipes are compared by this sum."""
    once: float = 0.0
    """Seconds of the run's start-up."""
    share: float = 0.0
    """Seconds of start-up that `seconds` includes; 0 if the number of steps of the run was not given."""
    doubts: tuple[str, ...] = ()
    """Warnings about assumptions of the simulation, as sentences."""

    peak_seconds: float = 0.0
    """Seconds of the model's FLOPs at the GPU's peak FLOP/s by data sheet; 0 if the step was not simulated in
    full.
    """

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, after the first ones."""
        return self.seconds - self.share

    @property
    def needed_bytes(self) -> int:
        """Bytes that must be free on the GPU: reserved memory and CUDA context."""
        return self.reserved_bytes + self.context_bytes
