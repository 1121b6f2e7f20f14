"""Progress messages of a search: finished tasks, the estimated seconds left, and the best recipe so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from snugfit.units import show_bytes

if TYPE_CHECKING:
    from snugfit.planning.plan import Choice

Tell = Callable[[str], None]

MIN_FINISHED = 8
"""Number of finished tasks before the time left is estimated, and weight of the previous estimate. One task
may take ten times as long as another.
"""


class Progress:
    """Report the number of finished tasks of a search and the estimated seconds left."""

    def __init__(self, label: str, total: int, tell: Tell) -> None:
        self.label, self.total, self.tell = label, total, tell
        self.done, self.skipped, self.began = 0, 0, time.monotonic()
        self.end: float | None = None

    def step(self, skips: bool = False, share: float = 1.0) -> None:
        """Count one more finished task of a search. A skipped task took no time, and only the fraction
        `share` of the remaining tasks will take time.
        """
        self.done += 1
        self.skipped += skips
        now = time.monotonic()
        left = ""
        if self.done - self.skipped >= min(self.total / 10, MIN_FINISHED):  # the first tasks wait for imports
            per_step = (now - self.began) / (self.done - self.skipped)
            estimate = now + per_step * (self.total - self.done) * share
            self.end = estimate if self.end is None else self.end + (estimate - self.end) / MIN_FINISHED
            left = f", about {_to_fives(max(0.0, self.end - now))} s left"
        self.tell(f"{self.label} {self.done} of {self.total}{left}")


def _to_fives(seconds: float) -> int:
    """Round seconds to whole ones, above ten to multiples of five, since the estimate is not more precise."""
    return round(seconds) if seconds < 10 else 5 * round(seconds / 5)


def with_best(tell: Tell, best_so_far: Callable[[], Choice | None], item: str) -> Tell:
    """Return a callback that appends the best known recipe that fits to every message.

    Its figures come first, since the line may be cut. `item` is the noun for parts of a batch.
    """

    def tell_with_best(message: str) -> None:
        if best := best_so_far():
            figures = f"{best.samples_per_second:,.1f} {item}/s, {show_bytes(best.needed_bytes)}"
            message += f"; best so far {figures}: {best.recipe}"
        tell(message)

    return tell_with_best
