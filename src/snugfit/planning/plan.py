"""The plan: what is best, what else is worth having, what was refused, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from snugfit.documents import decode_fields, encode, encode_fields
from snugfit.errors import UsageError
from snugfit.job.gpu import Gpu
from snugfit.job.job import Job
from snugfit.results.frame import Tabular
from snugfit.results.speed import StepSpeed, speed_of
from snugfit.techniques.recipe import Recipe

SCHEMA = 1
OBJECTIVES = ("speed", "memory", "cost")

NEARLY_AS_SMALL = 0.03
"""Of the bytes of the smallest recipe, how many more a nearest miss may take (chosen): nobody trains at half
the speed to miss by a little less."""

SLOWEST = 5
"""Times the answer's seconds (chosen): a recipe that is slower is no alternative to it. The smallest ones
recompute all and cut the batch into many micro-batches, and looking for those took a third of a plan."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A recipe, and what it takes."""

    recipe: str
    """In the notation of recipes."""

    requested_bytes: int
    """Most bytes that tensors and kernels ask for."""

    allocated_bytes: int
    """The same, as the allocator rounds it."""

    reserved_bytes: int
    """Most bytes that the allocator takes from the device."""

    context_bytes: int
    """CUDA's context and libraries, beside it."""

    step_seconds: float
    """Seconds of the steady step."""

    samples_per_second: float
    """Global batch over `step_seconds`."""

    once_seconds: float = 0.0
    """Seconds of start-up, from the process's beginning to steady steps."""

    def __post_init__(self) -> None:
        Recipe.parse(self.recipe)

    @property
    def needed_bytes(self) -> int:
        """What must be free on the device."""
        return self.reserved_bytes + self.context_bytes

    def pace(self, steps: int | None) -> float:
        """Seconds a step, with its share of the start-up of a run of so many steps; of the steady step where
        the run's length is not known."""
        return self.step_seconds + (self.once_seconds / steps if steps else 0.0)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How sure the answer's seconds are, and how near its step comes to the GPU's peak."""

    bound: str
    """What bounds the step (`StepSeconds.bound`)."""

    measured_rates: bool
    """Whether the GPU's rates were measured."""

    peak_seconds: float
    """What the model's arithmetic would take at the data sheet's peaks; 0 where those are not known."""


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """What was not considered, and why."""

    what: str
    """A technique, as a recipe writes it."""

    why: str
    """In words that a user can act on."""

    recipes: int = 0
    """How many recipes that ruled out; 0 where they were never put together."""


@dataclass(frozen=True, kw_only=True)
class KeptSlot:
    """A slot that was not searched."""

    slot: str
    """The slot's own name."""

    techniques: tuple[str, ...]
    """What may stand in it: the technique that is kept, then others of its family."""

    why: str
    """Why it is kept, and how it is freed."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A slot that the plan fills otherwise."""

    slot: str
    """The slot's own name."""

    theirs: str
    """What the user has in it."""

    ours: str
    """What the plan has in it."""

    needed_bytes: int | None = None
    """What the user's recipe takes with this change alone; None where that cannot be."""

    step_seconds: float | None = None
    """How long its step is."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """The user's recipe, and what the plan would change in it."""

    recipe: str
    """In the notation of recipes."""

    needed_bytes: int | None = None
    """What must be free on the device; None where the recipe cannot run."""

    step_seconds: float | None = None
    """Seconds of the steady step."""

    why_not: str = ""
    """Why it cannot run."""

    changes: tuple[Change, ...] = ()
    """Slot by slot; none where the plan has nothing to change."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why one slot of the best recipe is filled as it is."""

    slot: str
    """The slot's own name."""

    chosen: str
    """What stands in it."""

    against: str
    """What it is compared with: the slot's plain technique, or where that was chosen or would have to be
    lowered first, the fastest other."""

    needed_bytes: int | None = None
    """What the recipe would take with that other; None when that cannot be."""

    step_seconds: float | None = None
    """Seconds of its step."""

    once_seconds: float | None = None
    """Seconds of its start-up."""

    why_not: str = ""
    """Why that cannot be."""

    kept: str = ""
    """Why the slot was not searched, and how it is freed. With nothing to compare, `against` is empty."""

    because: str = ""
    """What makes the difference, where that is known."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How much was searched."""

    recipes: int
    """Valid recipes of the space."""

    tapes: int  # the key of the JSON document keeps this name
    """Different traces among them; the allocator, what products are computed in and who makes the batches
    change none."""

    footprints: int
    """Different live bytes at the worst moment."""

    passes: int
    """Kinds of passes that were rehearsed, on few layers where the model allows it."""

    replayed: int
    """Recipes whose step was put together in full, timed, and sent through the allocator."""


def nearest_miss(front_bytes: Sequence[int], objective: str) -> int:
    """Which recipe of a front, whose bytes fall from the fastest to the smallest, is shown when nothing
    fits."""
    if objective == "memory":
        return len(front_bytes) - 1
    most = front_bytes[-1] * (1 + NEARLY_AS_SMALL)
    return next(index for index, needed_bytes in enumerate(front_bytes) if needed_bytes <= most)


@dataclass(frozen=True, kw_only=True)
class Plan(Tabular):
    """The answer: with this GPU, this model and this batch, do that, because."""

    job: Job
    """What must be trained."""

    gpu: Gpu | None
    """The GPU that it is planned for."""

    memory_bytes: int | None
    """What may be used; None sets no bound."""

    headroom_bytes: int = 0
    """How much of it should stay free."""

    fidelity: str
    """The least exact that the user allows."""

    objective: str
    """`speed`, `memory` or `cost`."""

    steps: int | None = None
    """The run's length, over which the start-up was spread; None where it was not said."""

    front: tuple[Choice, ...]
    """Recipes than which no other is both as fast and as small, the fastest first; in JSON and on pages those
    that fit stand first. One that would be smaller than a faster one by less than 3 % or 160 MiB may be
    missing, the answer never; so are those slower than the answer by `SLOWEST` times, unless the whole front
    was asked for."""

    best: Choice | None
    """Of those that fit and leave the headroom, the one that the objective asks for; where none leaves it,
    the smallest that fits; None when nothing fits."""

    ranked: tuple[Choice, ...] = ()
    """The best that fit and are timed differently, as many as were asked for, the best first."""

    reasons: tuple[Reason, ...] = ()
    """Of the best recipe, or of the nearest miss, slot by slot."""

    kept: tuple[KeptSlot, ...] = ()
    """Slots that were not searched."""

    start: Start | None = None
    """The recipe that the user started from, where there is one."""

    cures: tuple[str, ...] = ()
    """When nothing fits: what would make it fit."""

    refused: tuple[Exclusion, ...] = ()
    """What was not considered."""

    counts: Counts
    """How much was searched."""

    verified: bool | None = None
    """Whether simulating the best recipe (or the nearest miss) in full gave the same figures."""

    timing: Pace | None = None
    """Of the best recipe (or the nearest miss); None where the GPU's rates are not known."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Packages that it was made with."""

    doubts: tuple[str, ...] = ()
    """What is less certain than the rest."""

    @property
    def fits(self) -> bool:
        """Whether any recipe fits the memory."""
        return self.best is not None

    @property
    def tight(self) -> bool:
        """Whether the best recipe leaves less than the headroom."""
        return self.best is not None and self.is_tight(self.best)

    def is_tight(self, choice: Choice) -> bool:
        """Whether a recipe fits and leaves less than the headroom."""
        return self.fitting(choice) and self.spare_bytes(choice) < self.headroom_bytes

    def fitting(self, choice: Choice) -> bool:
        """Whether a recipe fits the memory."""
        return self.spare_bytes(choice) >= 0

    @property
    def fitting_first(self) -> list[Choice]:
        """The front, what fits first: the order of its numbers."""
        return sorted(self.front, key=self.fitting, reverse=True)

    def spare_bytes(self, choice: Choice) -> float:
        """What a recipe leaves of the memory; infinite where there is no bound."""
        return math.inf if self.memory_bytes is None else self.memory_bytes - choice.needed_bytes

    def timed(self, choice: Choice) -> StepSpeed:
        """How fast a step of one of its recipes is; what bounds it, and so its MFU, is known of the answer
        alone."""
        seconds, known = choice.step_seconds, self.timing
        measured = known.measured_rates if known else None
        if known is None or choice != self.best_or_nearest:
            return speed_of(seconds, self.job, measured_rates=measured)
        mfu = known.peak_seconds / seconds if known.peak_seconds and seconds else None
        return speed_of(seconds, self.job, measured_rates=measured, bound=known.bound, mfu=mfu)

    def speed(self, choice: Choice) -> float:
        """Samples per second of one of its recipes, with the start-up where the run's length was said."""
        pace = choice.pace(self.steps)
        return self.job.batch_size / pace if pace else 0.0

    @property
    def nearest(self) -> Choice:
        """When nothing fits, the nearest miss: of the recipes that are nearly as small as the smallest the
        fastest; the smallest where that is asked for."""
        return self.front[nearest_miss([choice.needed_bytes for choice in self.front], self.objective)]

    @property
    def best_or_nearest(self) -> Choice:
        """The best, or the nearest miss."""
        return self.best or self.nearest

    def to_rows(self) -> list[dict[str, Any]]:
        """The recipes of the front, a row each, what fits first, the fastest of it first."""
        return [
            asdict(choice)
            | {
                "needed_bytes": choice.needed_bytes,
                "tokens_per_second": self.timed(choice).tokens_per_second,
                "fits": self.memory_bytes is None or choice.needed_bytes <= self.memory_bytes,
                "best": choice == self.best,
            }
            for choice in self.fitting_first
        ]

    def to_json(self) -> dict[str, Any]:
        """The document that `snugfit plan --json` prints; `Plan.from_json` reads it back."""
        keys: dict[str, Any] = {"fits": self.fits, "tight": self.tight, "front": encode(self.fitting_first)}
        keys["nearest_miss"] = None if self.best else encode(self.nearest)
        if self.timing:
            keys["timing"] = asdict(self.timing) | asdict(self.timed(self.best_or_nearest))
        return {"schema": SCHEMA, "what": "plan", **encode_fields(self, **keys)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The plan that `to_json` wrote. Raises `UsageError` for anything else."""
        if document.get("what") != "plan" or document.get("schema") != SCHEMA:
            raise UsageError("This is not a plan of this version of snugfit.")
        try:
            plan = decode_fields(cls, document)
            return replace(plan, front=tuple(sorted(plan.front, key=plan.fitting)))
        except (KeyError, TypeError) as damaged:
            raise UsageError(f"This plan is damaged: {damaged}.") from None
