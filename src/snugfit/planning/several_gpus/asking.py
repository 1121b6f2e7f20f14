"""Protocol of searches for several GPUs, and the recipe from which they start.

A search is a generator. It yields recipes to evaluate, several at a time, and receives their figures. One
search can thus run alone, and searches for many kinds of GPU can run together.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

from snugfit.errors import UsageError
from snugfit.job.job import Job
from snugfit.planning.keep import Kept
from snugfit.planning.several_gpus.candidates import DECIDED_ONCE, Shared, cuts, fillings, is_valid, ways
from snugfit.planning.several_gpus.judge import Judged
from snugfit.planning.several_gpus.sharings import MOST_AXES
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import MOST_GPUS
from snugfit.techniques.technique import Fidelity, Slot

MARGIN = 1.03
"""Factor on bytes found on few layers (chosen), so that a recipe that fits there also fits in full."""

_Result = TypeVar("_Result")

Asked = list[tuple[int, Recipe]]
"""Numbers of GPUs, each with a recipe to evaluate on so many."""

Asking = Generator[Asked, list[Judged], _Result]
"""Generator that yields requests, receives results in the same order, and returns its own result."""


def answer_to(asking: Asking[_Result], judge: Callable[[Asked], list[Judged]]) -> _Result:
    """Return the result of a generator that runs alone."""
    try:
        asked = next(asking)
        while True:
            asked = asking.send(judge(asked))
    except StopIteration as done:
        result: _Result = done.value
        return result


def counts_of(gpus: int | Sequence[int], job: Job, fixed: Kept) -> list[int]:
    """Return the numbers of GPUs that can divide the job's batch evenly, in order.

    Each GPU, or each group of them, takes a part. Raises `UsageError` if no number can.
    """
    asked = sorted({gpus} if isinstance(gpus, int) else set(gpus))
    wrong = [count for count in asked if type(count) is not int or not 1 <= count <= MOST_GPUS]
    if wrong or not asked:
        raise UsageError(f"gpus is {gpus!r}; it must be whole numbers from 1 to {MOST_GPUS:,}.")
    even = [count for count in asked if job.batch_size % count == 0 or any(_all_ways(job, count, fixed))]
    if not even:
        raise UsageError(
            f"A global batch of {job.batch_size} cannot be shared evenly by {asked[0]} GPUs"
            f"{' or any other number that was named' if len(asked) > 1 else ''}. Name a divisor of it."
        )
    return even


def choose_base(job: Job, counts: Sequence[int], fixed: Kept, fidelity: Fidelity) -> Asking[Recipe]:
    """Return the recipe whose techniques in `DECIDED_ONCE` take the least time.

    They are compared on the largest number of GPUs that gives each a part of the batch. One GPU alone may
    accept techniques that several refuse. Raises `UsageError` if no technique shares the job among them.
    """
    divisors = [count for count in counts if job.batch_size % count == 0]
    gpus = max(divisors or counts)
    shared = next(_all_ways(job, gpus, fixed), None)
    if shared is None:
        raise UsageError(f"No technique shares this job among {gpus} GPUs.")
    base = shared.cut(cuts(job, shared, fixed)[-1]) if shared.stages > 1 else shared.recipe
    for slot in DECIDED_ONCE:
        choices = [base.with_(one) for one in fillings(job, slot, fixed, fidelity)]
        valid = [one for one in choices if is_valid(job, one, gpus)]
        if len(valid) > 1:
            judged = yield [(gpus, one) for one in valid]
            timed = [(one.step_seconds, at) for at, one in enumerate(judged) if not one.why_not]
            base = valid[min(timed)[1]] if timed else base
        elif valid:
            base = valid[0]
    for slot in (Slot.BATCHING, *roster.slots_of_several_gpus()):
        base = base.with_(roster.plain(slot)) if slot not in fixed.slots else base
    return base


def _all_ways(job: Job, gpus: int, fixed: Kept) -> Iterator[Shared]:
    """Yield ways to share the job among so many GPUs, those with the fewest axes first."""
    base = Recipe(tuple(techniques[0] for techniques in fixed.slots.values()))
    for axes in range(MOST_AXES + 1):
        yield from ways(job, base, gpus, fixed, axes)
