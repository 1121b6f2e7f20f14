"""The parts of a search for several GPUs: the recipe that it starts from, and how often a batch is cut.

For one way of sharing and recomputing, the fewest micro-batches with which it fits are found by bisection:
fewer take less time and more memory. What asks for figures is a generator that yields what shall be judged,
several recipes at a time, and is sent what they take: one search then asks alone, and those of many kinds of
GPU ask together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from snugfit.errors import UsageError
from snugfit.job.job import Job
from snugfit.planning.keep import Kept
from snugfit.planning.several_gpus.candidates import DECIDED_ONCE, Shared, fillings, is_valid, sharings
from snugfit.planning.several_gpus.judge import Judged
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity, Technique

MARGIN = 1.03
"""Of bytes that are found on few layers (chosen): what is said to fit shall fit in full."""

_Result = TypeVar("_Result")

Asked = list[tuple[int, Recipe]]
"""Numbers of GPUs, and the recipes that are asked about on so many."""

Asking = Generator[Asked, list[Judged], _Result]
"""Yields what it asks, is sent the answers in the same order, and returns its result."""


def answer_to(asking: Asking[_Result], judge: Callable[[Asked], list[Judged]]) -> _Result:
    """The result of what asks, where nobody else does."""
    try:
        asked = next(asking)
        while True:
            asked = asking.send(judge(asked))
    except StopIteration as done:
        result: _Result = done.value
        return result


def choose_base(job: Job, gpus: int, fixed: Kept, fidelity: Fidelity) -> Asking[Recipe]:
    """The recipe whose slots that are decided once take the least time, on so many GPUs. Raises `UsageError`
    where no technique shares the job among them."""
    sharing = next(sharings(job, gpus, fixed), None)
    if sharing is None:
        raise UsageError(f"No technique shares this job among {gpus} GPUs.")
    base = Recipe(sharing)
    for slot, techniques in fixed.slots.items():
        base = base.with_(techniques[0]) if slot not in {one.slot for one in sharing} else base
    for slot in DECIDED_ONCE:
        choices = [base.with_(one) for one in fillings(job, slot, fixed, fidelity)]
        valid = [one for one in choices if is_valid(job, one, gpus)]
        if len(valid) > 1:
            judged = yield [(gpus, one) for one in valid]
            timed = [(one.step_seconds, at) for at, one in enumerate(judged) if not one.why_not]
            base = valid[min(timed)[1]] if timed else base
        elif valid:
            base = valid[0]
    return base


@dataclass
class Bisection:
    """The cuts of the batch with which one way of sharing is looked at."""

    shared: Shared
    cuts: list[Technique]
    low: int = 0
    high: int = -1
    """The fewest pieces that are known to fit are `cuts[high]`; -1 while none are."""
    best: Judged | None = None
    whole: Judged | None = None
    """What the least cut batch takes, whether it fits or not: no other cut takes less time."""
    smallest: Judged | None = None
    why_not: str = ""

    def next(self) -> Recipe | None:
        """The recipe to be judged next: the whole batch, then the smallest pieces, then between them."""
        if self.why_not or self.high == 0 or not self.cuts:
            return None
        if self.high < 0:
            if self.low > len(self.cuts) - 1:
                return None
            at = 0 if self.low == 0 else len(self.cuts) - 1
        else:
            at = (self.low + self.high) // 2
            if self.low >= self.high:
                return None
        self._at = at
        return self.shared.cut(self.cuts[at])

    def hear(self, judged: Judged, bound: int) -> None:
        """What the last recipe takes."""
        if self._at == 0 and not judged.why_not:
            self.whole = judged
        if judged.why_not:
            self.why_not = judged.why_not
        elif judged.needed_bytes * MARGIN <= bound:
            self.high, self.best = self._at, judged
        else:
            self.low = len(self.cuts) if self.high < 0 and self._at == len(self.cuts) - 1 else self._at + 1
            if self.smallest is None or judged.needed_bytes < self.smallest.needed_bytes:
                self.smallest, self.smallest_recipe = judged, self.shared.cut(self.cuts[self._at])

    @property
    def recipe(self) -> Recipe:
        """The fastest that fits."""
        return self.shared.cut(self.cuts[self.high])

    def is_wanted(self, ways_of_count: Sequence[Bisection]) -> bool:
        """Whether it may be the fastest of those on as many GPUs: not where the same sharing fits whole, and
        recomputes less or gathers less often."""
        for other in ways_of_count:
            if other is self:
                return True
            if self.shared.is_slower_than(other.shared) and (other.high == 0 or other.next() is not None):
                return False
        return True


def fitting(ways_to_share: Sequence[Bisection]) -> list[Bisection]:
    """Those that fit, as screened, the fastest first."""
    fit = [one for one in ways_to_share if one.best is not None]
    return sorted(fit, key=lambda one: one.best.step_seconds if one.best else math.inf)
