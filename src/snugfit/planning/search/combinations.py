"""All ways to put a recipe together of what each slot offers, without those that a technique objects to.

Slot by slot, and a technique is asked whether it objects as soon as the slots that it looks at are filled:
what two techniques object to together is left out with all that would follow, and counted. A space is a small
part of all combinations, and each of them would be asked a dozen questions.
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
    """One technique of each slot."""

    number: int
    """Among all combinations of the choices, those that are objected to too."""
    techniques: tuple[Technique, ...]
    setup: Setup
    """What they make, one after the other."""


class Objection(NamedTuple):
    """Why techniques do not go together."""

    technique: str
    """The one that objects, as a recipe writes it."""
    why: str


class _PendingObjection(NamedTuple):
    """What a technique is asked about the recipe around it."""

    technique: Technique
    ask: Callable[[Technique, TechniqueBySlot], str]
    """Gives its objection, empty where it has none."""
    waits_for: int
    """The slot without which it has no answer."""


class _NotYetFilledError(Exception):
    """A technique asks for a slot that is not filled yet."""

    def __init__(self, position: int) -> None:
        self.position = position


class _Beginning:
    """The recipe as far as it is put together."""

    def __init__(self, techniques: tuple[Technique, ...]) -> None:
        self._techniques = techniques

    def __getitem__(self, slot: Slot | str) -> Technique:
        position = _POSITIONS[Slot(slot)]
        if position >= len(self._techniques):
            raise _NotYetFilledError(position)
        return self._techniques[position]


class _WithoutKept:
    """The recipe as far as it is put together, with plain techniques in the slots that are not searched."""

    def __init__(self, recipe: TechniqueBySlot, fixed: Kept) -> None:
        self._recipe, self._fixed = recipe, fixed

    def __getitem__(self, slot: Slot | str) -> Technique:
        return roster.plain(Slot(slot)) if slot in self._fixed.slots else self._recipe[slot]


class Combinations:
    """All combinations of the choices to which no technique objects, in the order of the choices."""

    def __init__(self, choices: Sequence[Sequence[Technique]], job: Job, fixed: Kept) -> None:
        self.objections: Counter[Objection] = Counter()
        """What was objected to so far, with the number of combinations."""
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
        """What this technique is asked from here on."""
        if type(technique).objections is not Technique.objections:
            yield _PendingObjection(technique, self._objection, position)
        if type(technique).planned_without is not Technique.planned_without:
            yield _PendingObjection(technique, self._not_planned, position)

    def _still_open(
        self, questions: Sequence[_PendingObjection], techniques: tuple[Technique, ...]
    ) -> tuple[_PendingObjection, ...] | None:
        """Those of the questions that have no answer yet; None where one's answer is an objection, which is
        counted."""
        last, recipe = len(techniques) - 1, _Beginning(techniques)
        still_open = []
        for question in questions:
            if question.waits_for > last:
                still_open.append(question)
                continue
            try:
                why = question.ask(question.technique, recipe)
            except _NotYetFilledError as lacking:
                still_open.append(question._replace(waits_for=lacking.position))
                continue
            if why:
                self.objections[Objection(str(question.technique), why)] += self._following[last]
                return None
        return tuple(still_open)

    def _objection(self, technique: Technique, recipe: TechniqueBySlot) -> str:
        return next(technique.objections(self._job, recipe), "")

    def _not_planned(self, technique: Technique, recipe: TechniqueBySlot) -> str:
        """Why plans do not put it beside the others; empty where all of them are kept, or the user's own."""
        start = self._fixed.start
        if start and all(recipe[slot] == start[slot] for slot in Slot):
            return ""
        return technique.planned_without(self._job, _WithoutKept(recipe, self._fixed))
