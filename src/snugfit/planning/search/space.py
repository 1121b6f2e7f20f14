"""The search space of a plan: every valid recipe for a job.

Each slot (such as the optimizer) offers the settings of its techniques; a recipe has one of them in each
slot. Techniques that the user's fidelity, the GPU's age or a missing package excludes are omitted before the
combination, and listed. A setting that is never better than another is omitted likewise, such as adapters of
a higher rank. Combinations to which two techniques object are omitted recipe by recipe, and counted.

A large space has a hundred thousand recipes of a few dozen techniques. Shared properties are therefore
computed once and numbered: forward and backward passes, micro-batch size, and trace (`step_key.py`).

**Enumeration.** Enumeration of recipes: all combinations of one technique for each slot (such as precision or
optimizer), except invalid ones.

Slots are filled one by one. A technique's objections (incompatibilities) are evaluated as soon as the slots
that they read are filled. An objection excludes and counts all recipes with these techniques. Few
combinations are valid, and a separate check of each combination would take long.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from math import prod
from operator import ne
from typing import TYPE_CHECKING, NamedTuple

from snugfit.errors import RecipeError, SnugfitError
from snugfit.planning.keep import Kept
from snugfit.planning.plan import Exclusion
from snugfit.planning.step_key import as_written, passes_key, program_key, trace_key
from snugfit.techniques import roster
from snugfit.techniques.recipe import Recipe, unused_slots
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Slot, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job


Capability = tuple[int, int] | None

ALLOWED_BY = {
    Fidelity.ROUNDS: "it rounds differently (--fidelity rounds allows it)",
    Fidelity.LEARNS: "it is another algorithm (--fidelity learns allows it)",
}


EMPTY_KEPT = Kept()

_SLOT_INDICES = {slot: index for index, slot in enumerate(Slot)}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Valid recipe of a search. Recipes that share a property have the same identifier for it."""

    recipe: Recipe
    setup: Setup
    """`Setup` of the recipe."""
    update: Hashable
    """Key of the Setup's fields that determine the optimizer's update."""
    passes: int
    """Identifier of the recipe's forward and backward passes. Recipes that differ only in micro-batch size or
    update share it.
    """
    sized: int
    """Identifier of the recipe's forward and backward passes with this micro-batch size."""
    program: int
    """Identifier of the recipe's compiled layers; recipes that share it compile them once. Without compiled
    layers it identifies the same passes as `sized`.
    """
    trace: int
    """Identifier of the trace (allocations and kernels). Recipes that differ only in fp32 precision, data
    loader, allocator or CUDA graphs share it.
    """


@dataclass(frozen=True, kw_only=True)
class Space:
    """The set of all recipes that a search may choose, by number."""

    candidates: tuple[Candidate, ...]
    """Every valid recipe. A recipe's number is its index here."""
    excluded: tuple[Exclusion, ...]
    choices: tuple[tuple[Technique, ...], ...]
    """Techniques that the search may choose in each slot, with their settings."""
    fixed: Kept
    """Slots in which all recipes have a fixed technique, and the user's own recipe."""
    numbers: Mapping[int, int]
    """Number of each recipe, by its index among all combinations of `choices`."""
    trains: bool = True
    """True for a job with optimizer updates. Lower bounds of its recipes come from models with few layers."""
    graded: Mapping[Recipe, int] = field(default_factory=dict)
    """Recipes that `grades.py` added to the combinations of `choices`, with their numbers."""

    def number(self, recipe: Recipe) -> int | None:
        """Return the number of this recipe in the space; None if it is not in the space."""
        index = 0
        for technique, offered in zip(recipe, self.choices, strict=True):
            if technique not in offered:
                return self.graded.get(recipe)
            # The index is a number with one digit for each slot (mixed radix).
            index = index * len(offered) + offered.index(technique)
        return self.numbers.get(index)

    def variant(self, number: int, *techniques: Technique) -> int | None:
        """Return the number of a candidate with these techniques in place of its own; None if the space has
        no such candidate.
        """
        own, index = self.candidates[number].recipe.techniques, self._indices.get(number)
        for technique in techniques:
            slot = _SLOT_INDICES[technique.slot]
            digits = self._digits[slot]
            if index is None or technique not in digits:
                # A recipe with a grade has no digit, so it is looked up directly.
                return self.number(reduce(Recipe.with_, techniques, self.candidates[number].recipe))
            # Another technique changes one digit, so no recipe is created for the lookup.
            index += digits[technique] - digits[own[slot]]
        return None if index is None else self.numbers.get(index)

    @cached_property
    def _indices(self) -> dict[int, int]:
        """Index of each candidate among all combinations of techniques, in order of the candidates."""
        return {number: index for index, number in self.numbers.items()}

    @cached_property
    def _digits(self) -> list[dict[Technique, int]]:
        """Contribution of each technique to the index of a combination, for each slot of a recipe."""
        digits, stride = [], 1
        for offered in reversed(self.choices):
            digits.append({technique: stride * digit for digit, technique in enumerate(offered)})
            stride *= len(offered)
        return digits[::-1]

    @cached_property
    def simplest(self) -> Recipe:
        """The recipe without changes: the user's own recipe, or the plain one if there is none."""
        return self.fixed.start or Recipe()

    @cached_property
    def simpler(self) -> dict[int, tuple[int, ...]]:
        """Cache of the numbers of each recipe's simpler variants (`simpler.py`), by the recipe's number."""
        return {}

    def changes(self, recipe: Recipe) -> int:
        """Return the number of slots (choices of the recipe) in which a recipe differs from the simplest."""
        return sum(map(ne, recipe, self.simplest))

    def offers(self, slot: Slot) -> tuple[Technique, ...]:
        """Return the techniques that candidate recipes may have in this slot (a choice such as the
        optimizer).
        """
        return self.choices[_SLOT_INDICES[slot]]

    def variants(self, number: int, slot: Slot) -> Iterator[int]:
        """Yield the numbers of candidates that differ from this candidate only in this slot (a choice such as
        the optimizer).
        """
        for technique in self.offers(slot):
            other = self.variant(number, technique)
            if other is not None and other != number:
                yield other

    def others(self, recipe: Recipe, slot: Slot) -> Iterator[int]:
        """Yield the numbers of candidates that differ from this recipe only in this slot (a choice such as
        the optimizer).
        """
        for technique in self.offers(slot):
            number = self.number(recipe.with_(technique))
            if technique != recipe[slot] and number is not None:
                yield number


def space_of(
    job: Job,
    *,
    fidelity: Fidelity = Fidelity.ROUNDS,
    capability: Capability = None,
    fixed: Kept = EMPTY_KEPT,
    many_gpus: bool = False,
    front_end: str = "",
) -> Space:
    """Return all valid recipes for this job on a GPU of this compute capability.

    `fidelity` limits the numerical difference from the plain step. A `fixed` slot contains its technique
    regardless of fidelity. With `many_gpus`, techniques that compile layers for each GPU model are left out.
    Techniques that the training `front_end` refuses are left out too. Raises `RecipeError` if no recipe is
    valid.
    """
    excluded: list[Exclusion] = []
    choices = tuple(
        _offered_in(slot, job, fidelity, capability, fixed, excluded, many_gpus, front_end) for slot in Slot
    )
    combinations = Combinations(choices, job, fixed)
    candidates: list[Candidate] = []
    passes: dict[object, int] = {}
    sized: dict[object, int] = {}
    traces: dict[object, int] = {}
    programs: dict[object, int] = {}
    program_of: dict[int, int] = {}
    numbers: dict[int, int] = {}
    for number, techniques, setup in combinations:
        numbers[number] = len(candidates)
        of_passes, micro_batches, update = trace_key(setup)
        # Recorded steps (CUDA graphs) extend padded batches to full length, which changes their passes.
        if job.padding:
            of_passes = passes_key(as_written(setup, padded=True))
        kind = passes.setdefault(of_passes, len(passes))
        size = sized.setdefault((kind, micro_batches), len(sized))
        trace = traces.setdefault((size, update), len(traces))
        if size not in program_of:
            program_of[size] = programs.setdefault(program_key(setup) or size, len(programs))
        candidates.append(
            Candidate(
                recipe=Recipe(techniques),
                setup=setup,
                update=update,
                passes=kind,
                sized=size,
                program=program_of[size],
                trace=trace,
            )
        )
    if not candidates:
        raise RecipeError(_no_candidate(combinations.objections, fixed, job.words.verb))
    excluded += _by_reason(combinations.objections)
    return Space(
        candidates=tuple(candidates), excluded=tuple(excluded), choices=choices, fixed=fixed, numbers=numbers,
        trains=job.trains,
    )  # fmt: skip


def _by_reason(objections: Counter[Objection]) -> Iterator[Exclusion]:
    """Yield the refused techniques with their reasons; settings of one technique with the same reason are
    listed together.
    """
    by_reason: dict[tuple[str, str], list[Objection]] = defaultdict(list)
    for objection in objections:
        by_reason[objection.technique.partition("(")[0], objection.reason].append(objection)
    for (_, reason), group in by_reason.items():
        names = ", ".join(objection.technique for objection in group)
        yield Exclusion(what=names, why=reason, recipes=sum(objections[objection] for objection in group))


def _offered_in(
    slot: Slot,
    job: Job,
    fidelity: Fidelity,
    capability: Capability,
    fixed: Kept,
    excluded: list[Exclusion],
    many_gpus: bool,
    front_end: str,
) -> tuple[Technique, ...]:
    """Return the techniques that a search tries in this slot (a choice such as the optimizer). These are the
    fixed ones, or the possible ones and the user's own.
    """
    if slot in fixed.slots:
        first, *family = fixed.slots[slot]
        # A fixed technique stays even without its package; `Kept.refuse` reports that.
        return (first, *(other for other in family if not _missing_on(type(other), capability)))
    refused: list[Exclusion] = []
    offered = [
        technique
        for technique in _choices(slot, job, fidelity, capability, refused, many_gpus=many_gpus)
        if not front_end or _is_taken(technique, front_end, refused)
    ]
    choices = _best_settings(offered, capability, refused)
    # The user's own technique remains a choice, even if another one always beats it.
    own = fixed.start[slot] if fixed.start and slot not in unused_slots(job) else None
    if own and own not in choices and not _missing_on(type(own), capability):
        choices.append(own)
        refused = [exclusion for exclusion in refused if exclusion.what != own.name]
    excluded += refused
    return tuple(choices)


def _is_taken(technique: Technique, front_end: str, excluded: list[Exclusion]) -> bool:
    """Return True if this training loop supports the technique. Otherwise add the reason to `excluded` and
    return False.
    """
    from snugfit.step.applier import refuse_unsupported

    try:
        refuse_unsupported(front_end, technique.alone)
    except SnugfitError as refusal:
        excluded.append(Exclusion(what=str(technique), why=str(refusal)))
        return False
    return True


def _no_candidate(objections: Counter[Objection], fixed: Kept, verb: str) -> str:
    [(objection, _)] = objections.most_common(1)
    freed = ",".join(fixed.slots)
    return f"No recipe can {verb} this. {objection.technique}: {objection.reason}" + (
        f" Other techniques are allowed with --free {freed}." if freed else ""
    )


def _choices(
    slot: Slot,
    job: Job,
    fidelity: Fidelity,
    capability: Capability,
    excluded: list[Exclusion],
    *,
    many_gpus: bool,
) -> Iterator[Technique]:
    """Yield the techniques that a search tries in this slot; all omitted ones are added to `excluded`."""
    if slot in unused_slots(job):
        yield roster.plain(slot)
        return
    degrees = list(Fidelity)
    for technique in roster.techniques():
        if technique.slot is not slot:
            continue
        if technique.needs_several_gpus:
            excluded.append(Exclusion(what=technique.name, why="it needs several GPUs (--gpus N)"))
        elif (reason := _missing_on(technique, capability)) or (reason := technique.planning_objection(job)):
            excluded.append(Exclusion(what=technique.name, why=reason))
        elif many_gpus and (technique.lowered or technique.grades(job) or not any(technique.settings(job))):
            word = technique.last_resort or next(iter(technique.grades(job)), technique.name)
            reason = f"plans for many GPUs include it only on request (--keep '{word}')"
            excluded.append(Exclusion(what=technique.name, why=reason))
        elif degrees.index(own := technique.fidelity_for(job)) > degrees.index(fidelity):
            excluded.append(Exclusion(what=technique.name, why=ALLOWED_BY[own]))
        elif settings := dict.fromkeys(technique.settings(job)):
            if not technique.grades(job):
                yield from settings
        else:
            reason = (
                f"a plan searches a technique with finer settings instead (--keep "
                f"'{technique.name}' plans with it)"
            )
            excluded.append(Exclusion(what=technique.name, why=reason))


def _best_settings(
    choices: Sequence[Technique], capability: Capability, excluded: list[Exclusion]
) -> list[Technique]:
    """Return the techniques' settings without those that are never better than another setting, which are
    added to `excluded`.
    """
    better = {
        technique: next((o for o in choices if technique.is_never_better_than(o, capability)), technique)
        for technique in choices
    }
    best = [technique for technique in choices if better[technique] == technique]
    for other in best:
        if rest := [str(technique) for technique in choices if better[technique] == other != technique]:
            reason = f"never faster or smaller than {other} (--keep '{rest[0]}' plans with it)"
            excluded.append(Exclusion(what=", ".join(rest), why=reason))
    return best


def _missing_on(technique: type[Technique], capability: Capability) -> str | None:
    least = technique.least_capability
    if least and capability and capability < least:
        has = f"{capability[0]}.{capability[1]}"
        return f"it needs compute capability {least[0]}.{least[1]}, but this GPU has {has}"
    return technique.missing_package()


# ---- enumeration -------------------------------------------------------------------------------------------


_POSITIONS = {slot: position for position, slot in enumerate(Slot)}


class Combination(NamedTuple):
    """Candidate recipe of a search: one technique for each slot (such as precision or optimizer)."""

    number: int
    """Index among all combinations of the slots' techniques, including excluded ones."""
    techniques: tuple[Technique, ...]
    setup: Setup
    """Training settings that result from the recipe's techniques, applied one after the other."""


class Objection(NamedTuple):
    """Reason why one technique cannot be combined with others, which excludes recipes."""

    technique: str
    """Technique that cannot be combined, as text such as `lora(r=8)`."""
    reason: str


class _PendingObjection(NamedTuple):
    """A check of one technique that waits until another slot of the recipe has its technique."""

    technique: Technique
    check: Callable[[Technique, TechniqueBySlot], str]
    """Function that returns the reason why a technique cannot be combined with others, or an empty text."""
    waits_for: int
    """Index of the slot whose technique must be chosen before the check."""


class _EmptySlotError(Exception):
    """Error: a check reads a slot of the recipe that has no technique yet."""

    def __init__(self, position: int) -> None:
        self.position = position


class _Beginning:
    """An incomplete recipe: the techniques of the slots (such as precision) that are chosen so far."""

    def __init__(self, techniques: tuple[Technique, ...]) -> None:
        self._techniques = techniques

    def __getitem__(self, slot: Slot | str) -> Technique:
        position = _POSITIONS[Slot(slot)]
        if position >= len(self._techniques):
            raise _EmptySlotError(position)
        return self._techniques[position]


class _PartialRecipe:
    """An incomplete recipe in which slots fixed by the user have their default technique. Objections then
    concern only the slots that are searched.
    """

    def __init__(self, recipe: TechniqueBySlot, fixed: Kept) -> None:
        self._recipe, self._fixed = recipe, fixed

    def __getitem__(self, slot: Slot | str) -> Technique:
        return roster.plain(Slot(slot)) if slot in self._fixed.slots else self._recipe[slot]


class Combinations:
    """Iterable of all valid combinations of one technique per slot, in the order of `choices`."""

    def __init__(self, choices: Sequence[Sequence[Technique]], job: Job, fixed: Kept) -> None:
        self.objections: Counter[Objection] = Counter()
        """Reasons for exclusions so far, each with the number of combinations that it excluded."""
        self._choices, self._job, self._fixed = choices, job, fixed
        self._following = [prod(map(len, choices[position + 1 :])) for position in range(len(choices))]

    def __iter__(self) -> Iterator[Combination]:
        return self._extend(Combination(0, (), Setup()), ())

    def _extend(
        self, begun: Combination, open_questions: tuple[_PendingObjection, ...]
    ) -> Iterator[Combination]:
        position = len(begun.techniques)
        if position == len(self._choices):
            yield begun
            return
        offered = self._choices[position]
        for option, technique in enumerate(offered):
            techniques = (*begun.techniques, technique)
            questions = [*open_questions, *self._questions(technique, position)]
            still_open = self._run_checks(questions, techniques)
            if still_open is not None:
                number = begun.number * len(offered) + option
                yield from self._extend(
                    Combination(number, techniques, technique.install(begun.setup)), still_open
                )

    def _questions(self, technique: Technique, position: int) -> Iterator[_PendingObjection]:
        """Yield the checks of a technique that may depend on the techniques in other slots of the recipe."""
        # Most techniques inherit these methods, which never object.
        if type(technique).objections is not Technique.objections:
            yield _PendingObjection(technique, self._objection, position)
        if type(technique).planned_without is not Technique.planned_without:
            yield _PendingObjection(technique, self._not_planned, position)

    def _run_checks(
        self, checks: Sequence[_PendingObjection], techniques: tuple[Technique, ...]
    ) -> tuple[_PendingObjection, ...] | None:
        """Run the checks for which all needed slots have their techniques. Return the other checks; None
        after an objection, which is counted.
        """
        last, recipe = len(techniques) - 1, _Beginning(techniques)
        still_open = []
        for check in checks:
            if check.waits_for > last:
                still_open.append(check)
                continue
            try:
                reason = check.check(check.technique, recipe)
            except _EmptySlotError as lacking:
                # The check is repeated once the slot on which it depends has a technique.
                still_open.append(check._replace(waits_for=lacking.position))
                continue
            if reason:
                # The objection excludes every combination that begins with these techniques.
                self.objections[Objection(str(check.technique), reason)] += self._following[last]
                return None
        return tuple(still_open)

    def _objection(self, technique: Technique, recipe: TechniqueBySlot) -> str:
        return next(technique.objections(self._job, recipe), "")

    def _not_planned(self, technique: Technique, recipe: TechniqueBySlot) -> str:
        """Return the technique's reason why plans leave out this recipe; empty if there is none or it is the
        user's own recipe.
        """
        start = self._fixed.start
        if start and all(recipe[slot] == start[slot] for slot in Slot):
            return ""
        return technique.planned_without(self._job, _PartialRecipe(recipe, self._fixed))
