"""Detection of a process that all others wait for.

Each process times its own part of a step on the host. This part lasts from the beginning of its forward pass
to its loss, plus its wait for data. The medians are exchanged every `logging_steps`. A process whose median
is more than `SLOWER` times that of the others, `ROUNDS` times in a row, is named once.

With DDP this part contains only the process's own work. With FSDP it contains waits for other processes'
weights: a slow GPU is less visible, a slow loader equally.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, final

from snugfit.training.ranks import Ranks
from snugfit.units import show_seconds

if TYPE_CHECKING:
    from snugfit.training.journal import Journal

SLOWER = 1.3
"""Ratio of a process's seconds to the others' from which it counts as slow (chosen)."""

ROUNDS = 3
"""Number of consecutive comparisons in which a process must be slow (chosen). A single one may coincide with
a checkpoint, or with another program.
"""

LEAST_SECONDS = 1e-3
"""Least difference in seconds between processes that counts (chosen)."""


@final
class Stragglers:
    """Comparison of the step times of a run's processes, which finds a slow one."""

    def __init__(self, ranks: Ranks, journal: Journal, *, every: int) -> None:
        self._ranks, self._journal, self._every = ranks, journal, every
        self._seconds: list[float] = []
        self._slowest, self._rounds, self._is_told = -1, 0, False

    def note(self, step: int, seconds: float) -> None:
        """Record the seconds that this process computed in a step, without waits. All processes call it after
        each step.
        """
        self._seconds.append(seconds)
        if step % self._every == 0:
            own = [0.0] * self._ranks.size
            own[self._ranks.rank] = statistics.median(self._seconds)
            self._seconds.clear()
            self.compare(step, self._ranks.sum(own))

    def compare(self, step: int, seconds: list[float]) -> None:
        """Compare the seconds of all processes, given by rank, and write a warning if one is
        repeatedly slow.
        """
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        rest = statistics.median(value for rank, value in enumerate(seconds) if rank != slowest)
        is_slow = seconds[slowest] > max(SLOWER * rest, rest + LEAST_SECONDS)
        self._rounds = (self._rounds + 1 if slowest == self._slowest else 1) if is_slow else 0
        self._slowest = slowest
        if self._rounds == ROUNDS and not self._is_told:
            self._is_told = True
            self._journal.tell("warning", text=_text(step, slowest, seconds[slowest], rest), rank=slowest)


def _text(step: int, rank: int, seconds: float, rest: float) -> str:
    return (
        f"Step {step}: rank {rank} is slower than the others, and they wait for it: {show_seconds(seconds)} "
        f"for its own part of a step, where they take {show_seconds(rest)}. Look at its GPU's clock and at "
        "what else runs there, at its loader, and whether its samples are longer."
    )
