"""How a search for several GPUs asks, and the recipe that it starts from.

What asks for figures is a generator that yields what shall be judged, several recipes at a time, and is sent
what they take: one search then asks alone, and those of many kinds of GPU ask together.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

from snugfit.errors import UsageError
from snugfit.job.job import Job
from snugfit.planning.keep import Kept
from snugfit.planning.several_gpus.candidates import DECIDED_ONCE, fillings, is_valid, sharings
from snugfit.planning.several_gpus.judge import Judged
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.technique import Fidelity

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
