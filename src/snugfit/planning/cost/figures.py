"""Bytes and seconds of a recipe on one GPU: a lower bound, or exact values."""

from __future__ import annotations

from typing import NamedTuple


class BelowLowerBound(Exception):
    """Error: a simulated recipe took less than its computed lower bound, which makes a search's exclusions
    wrong.
    """


class Bound(NamedTuple):
    """Lower bound of a recipe's memory in bytes and of its step in seconds on one GPU."""

    needed_bytes: int
    """Live bytes at the worst moment, plus the context."""
    seconds: float
    """Seconds of a step with its share of the start-up."""
    resting_bytes: int = 0
    """The part of `needed_bytes` that is live in an update. Recomputing does not change it."""
    layers_bytes: int = 0
    """Largest bytes that are live in an update or while a layer runs. A loss in chunks does not change
    them."""
    unkept_bytes: int = 0
    """Bytes that would be live if no layer kept tensors for the backward pass."""
    device_seconds: float = 0.0
    """Seconds of a step in which the device works; 0 if unknown."""
    gradient_bytes: int = 0
    """Bytes of gradients at the end of the passes."""
    outside_bytes: int = 0
    """Peak of live bytes while no layer runs, without tensors kept by layers that are not recomputed."""
    compiled_bytes: int = 0
    """Lower bound of live bytes with compiled layers."""
    compiled_seconds: float = 0.0
    """Seconds of a step in which the device works, as far as they remain with compiled layers; 0 if
    unknown."""

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
    """Seconds of a step with its share of the start-up, by which recipes are compared."""
    once: float = 0.0
    """Seconds of the run's start-up."""
    share: float = 0.0
    """Share of the start-up in `seconds`; 0 if the run's length was not given."""
    doubts: tuple[str, ...] = ()
    """Assumptions of the simulation, as sentences."""

    peak_seconds: float = 0.0
    """Seconds of the model's arithmetic at the data sheet's peaks; 0 if the step was not simulated in
    full."""

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, after the first ones."""
        return self.seconds - self.share

    @property
    def needed_bytes(self) -> int:
        """Bytes that must be free on the device."""
        return self.reserved_bytes + self.context_bytes
