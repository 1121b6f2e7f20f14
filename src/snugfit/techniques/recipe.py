"""The recipe: one technique for each slot (a choice such as the optimizer or the precision), written as text.

    bf16 + tf32 + every_layer + micro_batches(4) + adamw_8bit(embeddings=8)

Slots without a named technique are plain, and the recipe without any name is written `plain`. Techniques are
joined by `+` in any order and printed in the order of the slots. Settings are in parentheses, by name or by
position. The text is parsed once into this immutable value, and `Recipe.parse(str(r)) == r` always (law 4 of
`dev/laws.md`). An error shows the whole text, marks the word that failed, and lists the most similar valid
ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from snugfit.errors import RecipeError
from snugfit.job.dtype import LOST_BELOW
from snugfit.job.phases import added_phases
from snugfit.techniques import roster
from snugfit.techniques.notation import parse
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Slot, Technique, setup_of

if TYPE_CHECKING:
    from snugfit.job.job import Job

PLAIN = "plain"
"""The text of the recipe in which every slot has its default."""

AUTO = "auto"
"""Word in a recipe for the least recomputation and offloading with which the step fits. Before the recipe is
created, a search replaces the word with a technique (`planning/search/auto.py`).
"""

AUTO_SLOTS = (Slot.CHECKPOINTING, Slot.ACTIVATION_OFFLOAD)
"""Slots that `auto` fills."""

_SLOTS = tuple(Slot)
_INDICES = {slot: index for index, slot in enumerate(_SLOTS)}

ONLY_TRAINING = (
    Slot.KERNELS,
    Slot.HEAD,
    Slot.CHECKPOINTING,
    Slot.ACTIVATION_OFFLOAD,
    Slot.OPTIMIZER,
    Slot.GRADIENTS,
)
"""Slots that only training uses. Other phases keep nothing for a backward pass and update no weights."""


def unused_slots(job: Job) -> frozenset[Slot]:
    """Return the slots (choices such as the optimizer) whose techniques change nothing in the phase of this
    job.
    """
    names = {slot for name, phase in added_phases().items() if name != job.phase for slot in phase.slots}
    names |= (job.added_phase or job.added_task).unused
    return frozenset(map(Slot, names)).union(() if job.trains else ONLY_TRAINING)


@dataclass(frozen=True)
class Recipe:
    """One technique for each slot (such as the optimizer). `Recipe()` has the defaults; the techniques given
    replace them.
    """

    techniques: tuple[Technique, ...] = ()
    """Techniques of the recipe, one per slot in the slots' order. A slot that is not given gets its default.
    """

    def __post_init__(self) -> None:
        try:
            slots = tuple([technique.slot for technique in self.techniques])
        except (TypeError, AttributeError):
            # The usual mistake is a text in place of techniques.
            raise RecipeError(
                f"Recipe takes techniques, not {self.techniques!r}. From text: "
                "Recipe.parse('bf16 + every_layer')."
            ) from None
        # A search creates very many complete recipes, which need no defaults.
        if slots == _SLOTS:
            return
        chosen: dict[Slot, Technique] = {}
        for technique in self.techniques:
            if other := chosen.get(technique.slot):
                raise RecipeError(_clash(other, technique))
            chosen[technique.slot] = technique
        filled = tuple(chosen.get(slot) or roster.plain(slot) for slot in Slot)
        # The class is frozen, so `__post_init__` cannot assign the field directly.
        object.__setattr__(self, "techniques", filled)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the recipe from its text. Raises `RecipeError` with the text and the invalid word."""
        return cls(tuple(techniques_of(text).values()))

    from_json = parse

    def to_json(self) -> str:
        """Return the recipe's text, its form in JSON output."""
        return str(self)

    def __str__(self) -> str:
        named = [str(technique) for technique in self if technique != roster.plain(technique.slot)]
        return " + ".join(named) or PLAIN

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the recipe as its text, since a technique's class gets its name from the roster."""
        return type(self).parse, (str(self),)

    def __iter__(self) -> Iterator[Technique]:
        """Return the recipe's techniques in the order of the slots, default ones too."""
        return iter(self.techniques)

    def __getitem__(self, slot: Slot | str) -> Technique:
        """Return the recipe's technique in this slot (a choice such as precision)."""
        return self.techniques[_INDICES[Slot(slot)]]

    def with_(self, technique: Technique) -> Recipe:
        """Return a copy of the recipe with `technique` in its slot (such as precision)."""
        return Recipe(tuple(technique if old.slot is technique.slot else old for old in self))

    @property
    def pieces(self) -> int:
        """Number of micro-batches into which the recipe splits the global batch."""
        count: int = self[Slot.BATCHING].value
        return count

    def setup(self) -> Setup:
        """Return the training loop's settings (`Setup`) for this recipe."""
        return _setup_of(self)

    def check(
        self, job: Job, compute_capability: tuple[int, int] | None = None, *, installed: bool = True
    ) -> tuple[str, ...]:
        """Return warnings about running `job` with this recipe on a GPU of this compute capability.

        Raises `RecipeError` with all objections together; with `installed`, missing packages that a technique
        needs are among them. No package is imported for that.
        """
        # All objections are collected, so that a user corrects a recipe once.
        objections: list[str] = [*job.added_task.objections(job, self)]
        for technique in self:
            objections += [f"{technique}: {text}" for text in technique.objections(job, self)]
            objections += _too_old(technique, compute_capability)
            if installed and (text := technique.missing_package()):
                objections.append(text)
        if objections:
            raise RecipeError("\n".join([f"{self} cannot run this job:", *objections]))
        return tuple(self._warnings(job, compute_capability))

    def lines_on_cpu(self) -> list[str]:
        """Return a sentence for each technique that has no effect on the CPU."""
        return [f"On the CPU {technique.name} {technique.on_cpu}." for technique in self if technique.on_cpu]

    def _warnings(self, job: Job, compute_capability: tuple[int, int] | None) -> Iterator[str]:
        for technique in self:
            own = technique.warnings(job, compute_capability)
            yield from (f"{technique}: {text}" for text in (*own, *technique.warnings_beside(job, self)))
            # A user may name a technique that no plan would choose. The objection becomes a warning.
            if doubt := technique.planning_objection(job) or technique.uncertain(job):
                yield f"{technique}: {doubt}."
        yield from (
            f"{technique}: it changes nothing in the phase {job.phase}. Leave it out."
            for technique in self
            if technique.slot in unused_slots(job) and not technique.plain
        )
        yield from self.lost_updates(job)

    def lost_updates(self, job: Job) -> Iterator[str]:
        """Yield a warning if the recipe trains 16-bit weights and small updates are rounded away."""
        if any(technique.keeps_small_updates for technique in self):
            return
        if job.trains and (below := LOST_BELOW.get(dtype := self.setup().trained_dtype(job))):
            # Only techniques that are installed and keep small updates help.
            able = [
                repr(candidate.name) for candidate in roster.techniques() if candidate.keeps_small_updates
            ]
            yield (
                f"All weights train in {dtype}, so an update below about {below} of a weight is lost in "
                "rounding, and training with small learning rates stalls. Try 'bf16' with dtype float32, "
                f"{' or '.join(able)}, which lose no small updates, or adapters, which are fp32."
            )


@functools.lru_cache(maxsize=4096)
def _setup_of(recipe: Recipe) -> Setup:
    """Return the training loop's settings (`Setup`) for a recipe, cached for repeated requests
    of a search.
    """
    return setup_of(*recipe)


def techniques_of(text: str) -> dict[Slot, Technique]:
    """Return the techniques that `text` names, by slot (a choice such as precision); a named default is
    included. Raises `RecipeError` with the text and the invalid word.
    """
    if not isinstance(text, str):
        raise RecipeError(f"A recipe must be text, such as 'bf16 + every_layer', not {text!r}.")
    chosen: dict[Slot, Technique] = {}
    if text.strip() in ("", PLAIN):
        return chosen
    for word in parse(text):
        # `plain` next to another technique contradicts it.
        if word.name == PLAIN:
            word.refuse(
                f"{PLAIN!r} is the recipe that names nothing, so nothing can be added to it. Leave it out."
            )
        if word.name == AUTO:
            word.refuse(
                f"{AUTO!r} starts a search, but here a finished recipe is needed. snugfit predict with "
                "a GPU searches, and prints the recipe. Give that recipe here. From Python: "
                f"snugfit.predict(job, 'bf16 + {AUTO}', gpu='h200').recipe."
            )
        technique = word.technique()
        if other := chosen.get(technique.slot):
            word.refuse(_clash(other, technique))
        chosen[technique.slot] = technique
    return chosen


def without_auto(text: str) -> str | None:
    """Return a recipe's text without the word `auto`; None for a text that has no `auto`. Raises
    `RecipeError` if the text also names a technique that `auto` chooses."""
    words = parse(text) if isinstance(text, str) and AUTO in text else []
    autos = [word for word in words if word.name == AUTO]
    if not autos:
        return None
    # The comparison excludes `auto(...)`, whose name is the same.
    if len(autos) > 1 or text[autos[0].start : autos[0].end] != AUTO:
        autos[-1].refuse(f"{AUTO!r} may be named only once, and has no settings. Remove the rest.")
    rest = " + ".join(text[word.start : word.end] for word in words if word.name != AUTO)
    named = techniques_of(rest)
    for slot in AUTO_SLOTS:
        if slot in named:
            autos[0].refuse(f"{AUTO!r} chooses the {slot}. Leave '{named[slot]}' out, or {AUTO!r}.")
    return rest or PLAIN


def _clash(first: Technique, second: Technique) -> str:
    if first.name == second.name:
        return f"{first.name!r} is named twice. A recipe has one {first.slot} technique."
    both = f"{first.name!r} and {second.name!r} are both {first.slot} techniques"
    return f"{both}. A recipe has one technique for each choice (slot). Keep one of them."


def _too_old(technique: Technique, compute_capability: tuple[int, int] | None) -> Iterator[str]:
    least = technique.least_capability
    if least and compute_capability and compute_capability < least:
        yield (
            f"{technique}: it needs compute capability {least[0]}.{least[1]} or newer, but this GPU has "
            f"{compute_capability[0]}.{compute_capability[1]}. Try {roster.plain(technique.slot).name!r}."
        )
