"""From a search to a plan: which point of the front, and for each slot why it is filled as it is.

A slot's reason is a comparison, and both sides are judged whole: the recipe against the same recipe with the
slot's plain technique in it; where the plain one was chosen, against the fastest other that it could hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from snugfit.errors import SnugfitError
from snugfit.job.gpu import all_gpus
from snugfit.job.limits import NO_SEQUENCE
from snugfit.planning.plan import Plan, Reason
from snugfit.planning.search.state import Searched
from snugfit.prediction.device import doubts_about
from snugfit.prediction.profile import installed_versions
from snugfit.prediction.worker_pool import Question, WorkerPool
from snugfit.techniques import roster
from snugfit.techniques.technique import Fidelity, Slot
from snugfit.units import show_bytes

if TYPE_CHECKING:
    from snugfit.job.gpu import Gpu
    from snugfit.job.job import Job
    from snugfit.planning.search.screening import Tell
    from snugfit.techniques.recipe import Recipe


def explained(
    found: Searched,
    pool: WorkerPool,
    *,
    job: Job,
    gpu: Gpu | None,
    memory_bytes: int | None,
    fidelity: Fidelity,
    objective: str,
    tell: Tell,
) -> Plan:
    """The plan that this search gives for so much memory."""
    front = found.front()
    fitting = [n for n in front if memory_bytes is None or found.judged[n].needed_bytes <= memory_bytes]
    best = None
    if fitting:
        best = fitting[-1] if objective == "memory" else fitting[0]
    shown = front[-1] if best is None else best
    tell("simulating the answer in full and comparing it slot by slot")
    verified, doubts = _questioned(found, pool, shown)
    reasons = tuple(_reasons(found, shown))
    return Plan(
        job=job,
        gpu=gpu,
        memory_bytes=memory_bytes,
        fidelity=fidelity.value,
        objective=objective,
        front=tuple(found.choice(number, job.batch_size) for number in front),
        best=None if best is None else found.choice(best, job.batch_size),
        reasons=reasons,
        cures=() if best is not None else tuple(_cures(found, front[-1], job, memory_bytes or 0, fidelity)),
        refused=(*found.space.excluded, *found.excluded),
        counts=found.counts(),
        verified=verified,
        versions=installed_versions(),
        doubts=tuple(dict.fromkeys((*doubts, *doubts_about(gpu)))),
    )


def _questioned(found: Searched, pool: WorkerPool, shown: int) -> tuple[bool, tuple[str, ...]]:
    """Rehearses the answer whole, and judges what its slots are compared with; gives whether the answer came
    out the same, and its doubts."""
    candidates = found.space.candidates
    others = {found.space.number(recipe) for _, recipe in _others(found, shown)}
    judging = [n for n in others if n is not None and n in found.bounds and n not in found.judged]
    todo = deque([shown, *judging])
    verified: Any = (False, ())

    def ask(worker: int) -> Question | None:
        if not todo:
            return None
        number = todo.popleft()
        if number == shown:
            return Question(shown, "verify", (candidates[shown].recipe, found.judged[shown]))
        return Question(number, "judge", ([candidates[number].setup],))

    for number, answer in pool.answers(ask):
        if number == shown and isinstance(answer, SnugfitError):
            raise answer
        if number == shown:
            verified = answer
        elif not isinstance(answer, SnugfitError):
            found.judged[number] = answer[0][0]
    same, doubts = verified
    return same, doubts


def _others(found: Searched, best: int) -> Iterator[tuple[Slot, Recipe]]:
    """For each slot that could be filled otherwise, the recipe that it is compared with."""
    recipe = found.space.candidates[best].recipe
    for slot in Slot:
        plain = roster.plain(slot)
        other = recipe.with_(plain) if recipe[slot] != plain else _fastest_other(found, recipe, slot)
        if other is not None:
            yield slot, other


def _reasons(found: Searched, best: int) -> Iterator[Reason]:
    """A reason for each slot that could be filled otherwise."""
    recipe = found.space.candidates[best].recipe
    for slot, other in _others(found, best):
        number = found.space.number(other)
        figures = None if number is None else found.judged.get(number)
        yield Reason(
            slot=slot.value,
            chosen=str(recipe[slot]),
            against=str(other[slot]),
            needed_bytes=figures.needed_bytes if figures else None,
            step_seconds=figures.step_seconds if figures else None,
            once_seconds=figures.once if figures else None,
            why_not="" if figures else "it cannot run this job on this GPU at this fidelity",
        )


def _fastest_other(found: Searched, recipe: Recipe, slot: Slot) -> Recipe | None:
    """The recipe with the technique in this slot that makes it fastest, by what was screened; None when the
    slot could hold nothing else that a trace would tell from it."""
    others = [
        (found.bounds[number].seconds, number)
        for number in found.space.others(recipe, slot)
        if number in found.bounds
    ]
    return found.space.candidates[min(others)[1]].recipe if others else None


def _cures(found: Searched, nearest: int, job: Job, memory_bytes: int, fidelity: Fidelity) -> Iterator[str]:
    """What would make the nearest miss fit."""
    figures = found.judged[nearest]
    lacking = figures.needed_bytes - memory_bytes
    recipe, needed = found.space.candidates[nearest].recipe, show_bytes(figures.needed_bytes)
    yield f"It would fit with {show_bytes(lacking)} more memory: {recipe} takes {needed}."
    sizes = [(gpu.memory_bytes or 0, gpu.key) for gpu in all_gpus() if gpu.compute_capability]
    if larger := [each for each in sizes if each[0] >= figures.needed_bytes]:
        size, key = min(larger)
        yield f"The smallest GPU of the table that has it is {key}, with {show_bytes(size)}."
    looser = list(Fidelity)[list(Fidelity).index(fidelity) + 1 :]
    if looser:
        more = [each.name for each in roster.techniques() if each.fidelity in looser]
        yield f"--fidelity {looser[-1].value} allows more: {', '.join(more)}."
    smaller = "smaller inputs" if job.task in NO_SEQUENCE else "shorter sequences"
    yield f"Or with {smaller}: the global batch is cut as far as it goes already."
