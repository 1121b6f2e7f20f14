"""The clocks of many GPUs as one, also where some of them have none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from snugfit.errors import GpuError
from snugfit.planning.cost.timer import GpuClocks
from snugfit.prediction.rates import rates_for

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.planning.cost.queue import Stretch
    from snugfit.rehearsal.trace.trace import Trace, Work


@dataclass(frozen=True)
class Each:
    """A clock for each GPU, asked one after the other."""

    clocks: tuple[Callable[[Trace], float], ...]

    def __call__(self, trace: Trace) -> tuple[float, ...]:
        """Seconds of the trace's steady step on each GPU."""
        return tuple(clock(trace) for clock in self.clocks)


@dataclass(frozen=True)
class Known:
    """The seconds of those GPUs whose rates are known, and 0 for the others."""

    clocks: GpuClocks
    """Of those whose rates are known."""
    places: tuple[int | None, ...]
    """Of each GPU, which of the clocks is its; None where its rates are not known."""

    @classmethod
    def on(cls, gpus: Sequence[Gpu]) -> Self:
        """The clocks of these GPUs."""
        known: list[Gpu] = []
        places: list[int | None] = []
        for gpu in gpus:
            if why_unknown(gpu):
                places.append(None)
            else:
                places.append(len(known))
                known.append(gpu)
        return cls(GpuClocks(known), tuple(places))

    def __call__(self, trace: Trace) -> tuple[float, ...]:
        """Seconds of the trace's steady step on each GPU."""
        told = self.clocks(trace)
        return tuple(0.0 if place is None else told[place] for place in self.places)

    def stretches(self, work: Work) -> Sequence[Stretch]:
        """What this does between the waits, on those that are known."""
        return self.clocks.stretches(work)

    def played(self, stretches: Sequence[Stretch]) -> Any:
        """Seconds of a steady step of these stretches, on each GPU."""
        told = self.clocks.played(stretches)
        unknown = np.zeros((*told.shape[:-1], 1))
        every = np.concatenate([told, unknown], axis=-1)
        return every[..., [-1 if place is None else place for place in self.places]]


def why_unknown(gpu: Gpu) -> str:
    """Why this GPU's seconds are not known; nothing where they are."""
    try:
        rates_for(gpu)
    except GpuError as unknown:
        return str(unknown)
    return ""
