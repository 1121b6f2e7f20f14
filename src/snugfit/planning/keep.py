"""The fixed slots of a plan. A slot is a choice of the recipe, such as the optimizer; the search does not
change fixed ones.

keep="lora(r=16, targets=all-linear) + bf16_pure" fixes these two techniques, regardless of their fidelity
(numerical closeness to the plain step). start="lora(r=8) + bf16 + every_layer" fixes this recipe's adapters,
precision and optimizer. free="optimizer" allows other optimizers.

The trained parameters, the number formats and the algorithm belong to the user's request. A plan that starts
from the user's own recipe therefore fixes these three slots, unless they are freed. An optimizer may be
exchanged for another of its family (`Technique.family`), which runs the same algorithm in other kernels. The
user's own techniques remain candidates in every slot, even if they are less exact than the plan's fidelity.
The user's own recipe is always a candidate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from snugfit.errors import UsageError, did_you_mean
from snugfit.job.job import Job
from snugfit.planning.plan import KeptSlot
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe, techniques_of, unused_slots
from snugfit.techniques.technique import Slot, Technique
from snugfit.techniques.wish import processes_of

Keep = Recipe | str | Mapping[Slot, Technique] | None
Free = str | Iterable[Slot | str]

START_SLOTS = (Slot.ADAPTERS, Slot.PRECISION, Slot.OPTIMIZER)
"""Slots (choices of a recipe) in which a plan keeps the user's technique from `start`, unless the user frees
them.
"""

ASKED, OWN = "kept as you asked", "kept from your own recipe"


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Slots (choices of the recipe, such as the optimizer) that a search does not change, and the user's own
    recipe.
    """

    slots: Mapping[Slot, tuple[Technique, ...]] = field(default_factory=dict)
    """Candidates of each fixed slot: the fixed technique, then others of its family (the same algorithm in
    other kernels)."""

    requested: frozenset[Slot] = frozenset()
    """Fixed slots that the user named. The other slots of `slots` are fixed because the user's own recipe has
    them.
    """

    start: Recipe | None = None
    """The user's own recipe, which the plan tries to improve; None without one."""

    several_gpus: bool = False
    """True if the plan is for several GPUs that train one model together."""

    def reason_for(self, slot: Slot) -> str:
        """Return the reason why a slot (a choice of the recipe) is fixed, and the option that frees it; empty
        for one that is searched.
        """
        if slot not in self.slots:
            return ""
        algorithm = "the algorithm " if len(self.slots[slot]) > 1 else ""
        return f"{algorithm}{ASKED if slot in self.requested else OWN} (--free {slot} allows others)"

    @property
    def preloaded(self) -> set[str]:
        """Modules that the fixed techniques of every recipe import in advance."""
        return {
            technique.preloaded
            for techniques in self.slots.values()
            for technique in techniques
            if technique.preloaded
        }

    def listing(self) -> tuple[KeptSlot, ...]:
        """Return the fixed slots (choices of the recipe) in the form of a plan's result."""
        return tuple(
            KeptSlot(slot=slot.value, techniques=tuple(map(str, self.slots[slot])), why=self.reason_for(slot))
            for slot in Slot
            if slot in self.slots
        )

    def refuse(self, capability: tuple[int, int] | None = None) -> None:
        """Raise `UsageError` for a requested technique that this plan or this machine cannot use.

        The technique may need a package that is not installed, or a GPU of another compute capability. No
        plan may search with it.
        """
        for technique in self.start or ():
            if technique.searched and not technique.is_searched():
                raise UsageError(
                    f"start: plans do not look at recipes with {technique}, whose steps are simulated in "
                    f"full. Start from {technique.name!r}, and predict the recipe with {technique}."
                )
        for slot in self.requested:
            technique = self.slots[slot][0]
            if technique.needs_several_gpus and not self.several_gpus:
                raise UsageError(
                    f"keep: {technique} needs several GPUs, and this plan is for one. Add --gpus N, or call "
                    "plan_several_gpus in Python."
                )
            if not technique.is_searched() and not (self.several_gpus and _is_axis(technique)):
                raise UsageError(
                    f"keep: plans do not search with {technique}, since each of its recipes is simulated in "
                    f"full, which takes up to minutes. Predict one that has it: 'bf16 + {technique}'."
                )
            if reason := self.slots[slot][0].missing_package() or self.too_new(capability):
                raise UsageError(f"keep: {reason}")

    def too_new(self, capability: tuple[int, int] | None) -> str:
        """Return the reason why a GPU of this compute capability cannot run a requested technique; empty if
        it can run all."""
        for slot in self.requested:
            technique = self.slots[slot][0]
            least = technique.least_capability
            if least and capability and capability < least:
                has = f"{capability[0]}.{capability[1]}"
                return f"{technique} needs compute capability {least[0]}.{least[1]}, but this GPU has {has}."
        return ""


def _is_axis(technique: Technique) -> bool:
    """Return True if the technique makes several GPUs work on the same samples, as tensor parallelism does.
    Plans for several GPUs search such techniques.
    """
    processes = processes_of(technique.alone)
    return processes is not None and bool(processes.axes)


def kept_of(job: Job, keep: Keep = None, free: Free = (), start: Recipe | None = None) -> Kept:
    """Return the fixed slots (choices of the recipe) for this job: those of the techniques in `keep`, and
    `START_SLOTS` of the recipe `start`.

    Slots in `free` are not fixed. Raises `UsageError` and `RecipeError` for unknown techniques and slots.
    """
    freed, named = _slots_of(free), techniques_named(keep)
    requested = {slot: (technique,) for slot, technique in named.items() if slot not in freed}
    own = {
        slot: (start[slot], *_family(start[slot], job))
        for slot in START_SLOTS
        if start and slot not in freed and slot not in unused_slots(job)
        # A technique without its package must not be the only choice of its slot.
        if not start[slot].missing_package()
    }
    # A named technique replaces that of the user's own recipe.
    return Kept(slots={**own, **requested}, requested=frozenset(requested), start=start)


def _family(technique: Technique, job: Job) -> list[Technique]:
    """Return other techniques with the same algorithm as this one, such as other kernels of the same
    optimizer.
    """
    if not technique.family:
        return []
    kinds = [
        kind
        for kind in roster.techniques()
        if (kind.slot, kind.family) == (technique.slot, technique.family)
        and not kind.missing_package()
        and not kind.planning_objection(job)
    ]
    return [setting for kind in kinds for setting in kind.settings(job) if setting != technique]


def techniques_named(keep: Keep) -> Mapping[Slot, Technique]:
    """Return the techniques in `keep` (text, recipe or mapping) by slot (choice of the recipe). Raises
    `UsageError` for an empty `keep` and `RecipeError` for unknown techniques.
    """
    if keep is None:
        return {}
    if isinstance(keep, Mapping):
        return keep
    if isinstance(keep, Recipe):
        return {technique.slot: technique for technique in keep if not technique.plain}
    if named := techniques_of(keep):
        return named
    raise UsageError(f"keep is {keep!r}, which names no technique. Give some, such as 'lora(r=8) + bf16'.")


def _slots_of(free: Free) -> frozenset[Slot]:
    legal = [slot.value for slot in Slot]
    if not isinstance(free, Iterable):
        raise UsageError(f"free is {free!r}; it must be slots such as ('optimizer',), of {', '.join(legal)}.")
    words = free.split(",") if isinstance(free, str) else list(free)
    for word in (stripped for stripped in map(str.strip, words) if stripped not in legal):
        raise UsageError(
            f"free: {word!r} is not a slot (a choice of the recipe, such as "
            f"optimizer).{did_you_mean(word, legal)} Slots are {', '.join(legal)}."
        )
    return frozenset(Slot(word.strip()) for word in words)
