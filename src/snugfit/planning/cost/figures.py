"""Figures of a recipe on one GPU: first its lower bound, then its exact values."""

from __future__ import annotations

from typing import NamedTuple


class BelowLowerBound(Exception):
    """A Setup took less than its lower bound: layers do not grow as two depths of the model suggested."""


class Bound(NamedTuple):
    """Lower bound of a Setup's cost on one GPU."""

    needed_bytes: int
    """Live bytes at the worst moment, plus the context."""
    seconds: float
    """Seconds of a step with its share of the start-up."""
    resting_bytes: int = 0
    """Bytes of `needed_bytes` that are live in an update. Recomputed activations do not change them."""
    layers_bytes: int = 0
    """Peak of bytes that are live in an update or while a layer runs. No other loss changes them."""
    unkept_bytes: int = 0
    """Bytes that would be live if no layer kept tensors for the backward pass."""
    device_seconds: float = 0.0
    """Seconds of `seconds` in which the device works; 0 if unknown."""
    gradient_bytes: int = 0
    """Bytes that the passes leave to the update."""
    outside_bytes: int = 0
    """Peak of live bytes while no layer runs, without tensors kept by layers that are not recomputed."""
    compiled_bytes: int = 0
    """Lower bound of live bytes with compiled layers."""
    compiled_seconds: float = 0.0
    """Seconds of `device_seconds` that remain with compiled layers; 0 if unknown."""

    def at_least(self, other: Bound) -> Bound:
        """Return the larger bytes and seconds of both."""
        return Bound(max(self.needed_bytes, other.needed_bytes), max(self.seconds, other.seconds))


class Figures(NamedTuple):
    """Exact figures of a Setup on one GPU."""

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    context_bytes: int
    seconds: float
    """Seconds of a step with its share of the start-up, the figure that comparisons of recipes use."""
    once: float = 0.0
    """Seconds of the run's start-up."""
    share: float = 0.0
    """Share of the start-up in `seconds`; 0 if the run's length was not given."""
    doubts: tuple[str, ...] = ()
    """Assumptions of the rehearsal, as sentences."""

    peak_seconds: float = 0.0
    """Seconds of the model's arithmetic at the data sheet's peaks; 0 if the step was not simulated in
    full."""

    @property
    def step_seconds(self) -> float:
        """Seconds of the steady step."""
        return self.seconds - self.share

    @property
    def needed_bytes(self) -> int:
        """Bytes that must be free on the device."""
        return self.reserved_bytes + self.context_bytes
