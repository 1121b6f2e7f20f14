"""The clock of a plan: the seconds of a tape on one GPU, kernel by kernel remembered.

The seconds are `prediction/seconds.py`'s: the same rates, the same queue. A plan asks about thousands of
tapes of the same few kernels, and only for the length of the step, so what one kernel takes is looked up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from snugfit.prediction.kernel_seconds import KernelClock
from snugfit.prediction.rates import Rates, rates_for
from snugfit.prediction.seconds import asking, play

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.rehearsal.tape import Kernel, Tape


class GpuClock:
    """Seconds of a step on this GPU; it travels between processes. Raises `GpuError` when the table does not
    say how fast the GPU is."""

    def __init__(self, gpu: Gpu) -> None:
        self.rates: Rates = rates_for(gpu)
        self._clock = KernelClock(self.rates)
        self._remembered: dict[Kernel, tuple[float, float]] = {}

    def __call__(self, tape: Tape) -> float:
        """Seconds of the tape's steady step."""
        device, asked = [], []
        for kernel in tape.kernels:
            both = self._remembered.get(kernel)
            if both is None:
                both = self._clock.seconds(kernel), asking(kernel, self.rates.host)
                self._remembered[kernel] = both
            device.append(both[0])
            asked.append(both[1])
        return play(device, asked, tape.waits, self.rates.host)
