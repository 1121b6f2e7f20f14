"""What a run takes while it goes on: seconds of its steps, how much of them was of use and, on a GPU, the
allocator's peaks."""

from __future__ import annotations

import statistics
from collections import deque
from typing import TYPE_CHECKING, Any, final

from snugfit.training.predicted import Foreseen

if TYPE_CHECKING:
    import torch

WARMUP = 3
"""Steps that a process takes before it is steady, as where steps are measured
(`measurement/stopwatch.py`)."""

MOST = 1000
"""Steps whose seconds are remembered."""


@final
class Pace:
    """Remembers what the steps of one recipe took, from when it was made."""

    def __init__(self, device: torch.device, *, every: int, foreseen: Foreseen | None = None) -> None:
        self._device, self._every, self._foreseen, self._taken = device, every, foreseen, 0
        self._seconds: deque[float] = deque(maxlen=MOST)
        if device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(device)

    def told(self, step: int, seconds: float, samples: int, tokens: int) -> dict[str, Any]:
        """What is told with a step over so much data: `mfu`, where it is known, and every so often the bytes
        that the allocator has reserved at most. Asking it each time would cost small models something."""
        self._taken += 1
        if self._taken > WARMUP:
            self._seconds.append(seconds)
        used = self._foreseen.mfu(seconds, samples, tokens) if self._foreseen else None
        of_use = {} if used is None else {"mfu": used}
        return {**of_use, **self._peaks()} if step % self._every == 0 else of_use

    def in_all(self) -> dict[str, Any]:
        """What is told at the end: the peaks, and the median of the steady steps."""
        steady = {"step_seconds": statistics.median(self._seconds)} if self._seconds else {}
        return {**self._peaks(), **steady}

    def _peaks(self) -> dict[str, Any]:
        if self._device.type != "cuda":
            return {}
        import torch

        return {
            "allocated_bytes": torch.cuda.max_memory_allocated(self._device),
            "reserved_bytes": torch.cuda.max_memory_reserved(self._device),
        }
