"""How a search for several GPUs asks, and the recipe that it starts from.

What asks for figures is a generator that yields what shall be judged, several recipes at a time, and is sent
what they take: one search then asks alone, and those of many kinds of GPU ask together.
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


def counts_of(gpus: int | Sequence[int], job: Job, fixed: Kept) -> list[int]:
    """The numbers of GPUs that can share the job's batch evenly, each a part of it or groups of them, in
    order. Raises `UsageError` where none can."""
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
    """The recipe whose slots that are decided once take the least time, on the most of these numbers of GPUs
    of which each can have a part of the batch: one GPU alone may take what several refuse. Raises
    `UsageError` where no technique shares the job among them."""
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
    """Ways to share the job among so many GPUs, by as few axes as may be."""
    base = Recipe(tuple(techniques[0] for techniques in fixed.slots.values()))
    for axes in range(MOST_AXES + 1):
        yield from ways(job, base, gpus, fixed, axes)
