"""The clocks of many GPUs as one, also where some of them have none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from snugfit.errors import GpuError
from snugfit.planning.clock import GpuClocks
from snugfit.prediction.rates import rates_for

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.rehearsal.sizes import Work
    from snugfit.rehearsal.tape import Tape


@dataclass(frozen=True)
class Each:
    """A clock for each GPU, asked one after the other."""

    clocks: tuple[Callable[[Tape], float], ...]

    def __call__(self, tape: Tape) -> tuple[float, ...]:
        """Seconds of the tape's steady step on each GPU."""
        return tuple(clock(tape) for clock in self.clocks)


@dataclass(frozen=True)
class Known:
    """The seconds of those GPUs whose rates are known, and 0 for the others."""

    clocks: GpuClocks | None
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
        return cls(GpuClocks(known) if known else None, tuple(places))

    def __call__(self, tape: Tape) -> tuple[float, ...]:
        """Seconds of the tape's steady step on each GPU."""
        return self._placed(self.clocks(tape) if self.clocks else ())

    def of(self, works: Sequence[Work]) -> tuple[float, ...]:
        """Seconds of a steady step that does these one after the other, on each GPU."""
        return self._placed(self.clocks.of(works) if self.clocks else ())

    def _placed(self, told: Sequence[float]) -> tuple[float, ...]:
        return tuple(0.0 if place is None else told[place] for place in self.places)


def why_unknown(gpu: Gpu) -> str:
    """Why this GPU's seconds are not known; nothing where they are."""
    try:
        rates_for(gpu)
    except GpuError as unknown:
        return str(unknown)
    return ""
