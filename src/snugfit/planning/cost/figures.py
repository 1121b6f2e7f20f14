"""What a search knows of a recipe on one GPU: first the least that it can take, then what it takes."""

from __future__ import annotations

from typing import NamedTuple


class BelowLowerBound(Exception):
    """A Setup took less than its lower bound: layers do not grow as two depths of the model seemed to."""


class Bound(NamedTuple):
    """The least that a Setup takes on one GPU."""

    needed_bytes: int
    """Live bytes at the worst moment, and the context."""
    seconds: float
    """A step's, with its share of the start-up."""
    resting_bytes: int = 0
    """Of the bytes, those that are live in an update: no recomputing of activations changes them."""
    layers_bytes: int = 0
    """Of the bytes, the most that are live in an update or while a layer runs: no other loss changes them."""
    unkept_bytes: int = 0
    """Of the bytes, those that would be live if no layer kept anything for the backward pass."""
    device_seconds: float = 0.0
    """Of the seconds, those that the device works; 0 where that is not known."""
    gradient_bytes: int = 0
    """Of the bytes, those that the passes leave to the update."""
    depth: int = 0
    """Layers of each stack of the model, which repeat; 0 where they do not."""
    outside_bytes: int = 0
    """Of the bytes, the most that would be live while no layer runs, if no layer kept anything that is not
    recomputed."""
    compiled_bytes: int = 0
    """Of the bytes, those that would be live at least if layers were compiled."""
    compiled_seconds: float = 0.0
    """Of the device's seconds, those that are left where layers are compiled; 0 where that is not known."""

    def at_least(self, other: Bound) -> Bound:
        """The larger bytes and seconds of both."""
        return Bound(max(self.needed_bytes, other.needed_bytes), max(self.seconds, other.seconds))


class Figures(NamedTuple):
    """What a Setup takes on one GPU."""

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    context_bytes: int
    seconds: float
    """A step's, with its share of the start-up: what recipes are compared by."""
    once: float = 0.0
    """Seconds of the run's start-up."""
    share: float = 0.0
    """Of `seconds`, the share of the start-up; 0 where the run's length was not said."""
    doubts: tuple[str, ...] = ()
    """What the rehearsal had to assume."""

    peak_seconds: float = 0.0
    """What the model's arithmetic would take at the data sheet's peaks; 0 where the step was not simulated in
    full."""

    @property
    def step_seconds(self) -> float:
        """Seconds of the steady step."""
        return self.seconds - self.share

    @property
    def needed_bytes(self) -> int:
        """What must be free on the device."""
        return self.reserved_bytes + self.context_bytes
