"""Enumeration of recipes: all combinations of one technique for each slot (such as precision or optimizer),
except invalid ones.

Slots are filled one by one. A technique's objections (incompatibilities) are evaluated as soon as the slots
that they read are filled. An objection excludes and counts all recipes with these techniques. Few
combinations are valid, and a separate check of each combination would take long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from snugfit.planning.keep import Kept
from snugfit.techniques import roster
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Slot, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job

_POSITIONS = {slot: position for position, slot in enumerate(Slot)}


class Combination(NamedTuple):
    """Candidate recipe of a search: one technique for each slot (such as precision or optimizer)."""

    number: int
    """Index among all combinations of the choices, including excluded ones."""
    techniques: tuple[Technique, ...]
    setup: Setup
    """`Setup` of the recipe's techniques, applied one after the other."""


class Objection(NamedTuple):
    """Reason why one technique cannot be combined with others, which excludes recipes."""

    technique: str
    """Technique that cannot be combined, as text such as `lora(r=8)`."""
    why: str


class _PendingObjection(NamedTuple):
    """A check of one technique that waits until another slot of the recipe has its technique."""

    technique: Technique
    ask: Callable[[Technique, TechniqueBySlot], str]
    """Function that returns the reason against the combination, or an empty text."""
    waits_for: int
    """Index of the slot that the check needs."""


class _NotYetFilledError(Exception):
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
            raise _NotYetFilledError(position)
        return self._techniques[position]


class _WithoutKept:
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
        """Reasons for exclusions so far, with the number of combinations that each excluded."""
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
            still_open = self._still_open(questions, techniques)
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

    def _still_open(
        self, questions: Sequence[_PendingObjection], techniques: tuple[Technique, ...]
    ) -> tuple[_PendingObjection, ...] | None:
        """Run the checks for which all needed slots have their techniques. Return the other checks; None
        after an objection, which is counted.
        """
        last, recipe = len(techniques) - 1, _Beginning(techniques)
        still_open = []
        for question in questions:
            if question.waits_for > last:
                still_open.append(question)
                continue
            try:
                why = question.ask(question.technique, recipe)
            except _NotYetFilledError as lacking:
                # The check is repeated once the slot that it has read is filled.
                still_open.append(question._replace(waits_for=lacking.position))
                continue
            if why:
                # The objection excludes every combination that begins with these techniques.
                self.objections[Objection(str(question.technique), why)] += self._following[last]
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
        return technique.planned_without(self._job, _WithoutKept(recipe, self._fixed))
