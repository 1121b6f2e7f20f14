"""Results of a plan: the best recipe, alternatives, exclusions, and the reasons."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Self

from snugfit.documents import JsonDocument, encode
from snugfit.job.gpu import Gpu
from snugfit.job.job import Job
from snugfit.results.frame import Tabular
from snugfit.results.speed import StepSpeed, speed_of
from snugfit.results.ways_out import WaysOut
from snugfit.techniques.recipe import Recipe

OBJECTIVES = ("speed", "memory", "cost")

NEARLY_AS_SMALL = 0.03
"""Share of the smallest recipe's bytes by which the shown nearest miss may be larger (chosen). Halving the
speed for a slightly smaller miss is not worthwhile."""

SLOWEST = 5
"""Limit of an alternative's seconds, in multiples of the answer's seconds (chosen). The smallest recipes
recompute every layer and use many micro-batches. The search for them took a third of a plan."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A recipe of a plan, with its memory in bytes and its seconds per step."""

    recipe: str
    """Recipe in the notation of recipes."""

    requested_bytes: int
    """Peak of the bytes that tensors and kernels request."""

    allocated_bytes: int
    """Peak of these bytes after the allocator's rounding."""

    reserved_bytes: int
    """Peak of the bytes that the allocator reserves on the device."""

    context_bytes: int
    """Bytes of CUDA's context and libraries, outside the allocator."""

    step_seconds: float
    """Seconds of the steady step."""

    samples_per_second: float
    """Global batch over `step_seconds`."""

    once_seconds: float = 0.0
    """Seconds of start-up, from the start of the process to steady steps."""

    def __post_init__(self) -> None:
        Recipe.parse(self.recipe)

    @property
    def needed_bytes(self) -> int:
        """Bytes that must be free on the device."""
        return self.reserved_bytes + self.context_bytes

    def pace(self, steps: int | None) -> float:
        """Return the seconds of a step plus its part of the start-up of a run of `steps` steps.

        Without a run length, return the seconds of the steady step.
        """
        return self.step_seconds + (self.once_seconds / steps if steps else 0.0)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The hardware limit of the recipe's speed, and the fraction of the GPU's peak FLOP/s that it reaches."""

    bound: str
    """Resource that bounds the step (`StepSeconds.bound`)."""

    measured_rates: bool
    """True if the GPU's rates were measured."""

    peak_seconds: float
    """Seconds of the model's arithmetic at the data sheet's peaks; 0 if these are unknown."""


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """A technique that was not considered, and the reason."""

    what: str
    """Technique in the notation of recipes."""

    why: str
    """Reason in words that a user can act on."""

    recipes: int = 0
    """Number of recipes that this excluded; 0 if they were never generated."""


@dataclass(frozen=True, kw_only=True)
class KeptSlot:
    """A slot (a choice of the recipe, such as precision) that the search left as the user set it."""

    slot: str
    """The slot's own name."""

    techniques: tuple[str, ...]
    """Candidates of this slot: the fixed technique, then others of its family."""

    why: str
    """Reason why the slot is fixed, and the option that frees it."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A difference between the plan's recipe and the user's: both techniques of one slot (such as the
    optimizer), and the effect.
    """

    slot: str
    """The slot's own name."""

    theirs: str
    """The user's technique in this slot."""

    ours: str
    """The plan's technique in this slot."""

    needed_bytes: int | None = None
    """Bytes needed by the user's recipe with this change alone; None if that recipe is invalid."""

    step_seconds: float | None = None
    """Seconds of a step of that recipe."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """The user's recipe with its bytes and seconds, and the changes that the plan proposes."""

    recipe: str
    """Recipe in the notation of recipes."""

    needed_bytes: int | None = None
    """Bytes that must be free on the device; None if the recipe cannot run."""

    step_seconds: float | None = None
    """Seconds of the steady step."""

    why_not: str = ""
    """Reason why the recipe cannot run."""

    changes: tuple[Change, ...] = ()
    """Changes by slot; empty if the plan changes nothing."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """The reason for the best recipe's technique in one slot (a choice of the recipe, such as the
    optimizer).
    """

    slot: str
    """The slot's own name."""

    chosen: str
    """The best recipe's technique in this slot."""

    against: str
    """Technique of the comparison: the slot's plain technique, or else the fastest other one.

    The fastest other one replaces a plain technique that was chosen, or that first needs a lower setting.
    """

    needed_bytes: int | None = None
    """Bytes needed by the recipe with that other technique; None if this is impossible."""

    step_seconds: float | None = None
    """Seconds of a step of that recipe."""

    once_seconds: float | None = None
    """Seconds of start-up of that recipe."""

    why_not: str = ""
    """Reason why that recipe is impossible."""

    kept: str = ""
    """Reason why the slot was not searched, and the option that frees it. `against` is then empty."""

    because: str = ""
    """Cause of the difference in seconds, if it is known."""

    is_estimated: bool = False
    """True if the other recipe was not compiled. Its figures then follow from the lower bounds of the
    uncompiled recipes."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of recipes that the search considered, bounded and simulated."""

    recipes: int
    """Number of valid recipes in the space."""

    tapes: int  # the key of the JSON document keeps this name
    """Number of different traces among them. The allocator, the number format of fp32 products and the loader
    do not change a trace."""

    footprints: int
    """Number of different peaks of live bytes."""

    passes: int
    """Number of kinds of forward and backward passes that were simulated, on few layers if the model allows
    it.
    """

    replayed: int
    """Number of recipes whose whole step was assembled, timed and replayed through the allocator."""


def nearest_miss(front_bytes: Sequence[int], objective: str) -> int:
    """Return the index of the recipe to show when nothing fits.

    `front_bytes` are the bytes of a front in descending order, from the fastest recipe to the smallest.
    """
    if objective == "memory":
        return len(front_bytes) - 1
    most = front_bytes[-1] * (1 + NEARLY_AS_SMALL)
    return next(index for index, needed_bytes in enumerate(front_bytes) if needed_bytes <= most)


@dataclass(frozen=True, kw_only=True)
class Plan(JsonDocument, Tabular):
    """The best recipe for a GPU, a model and a batch, with the reasons for it."""

    what: ClassVar = "plan"

    job: Job
    """The training job of the plan."""

    gpu: Gpu | None
    """GPU for which the plan is made."""

    memory_bytes: int | None
    """Bytes that may be used; None for no limit."""

    headroom_bytes: int = 0
    """Bytes of `memory_bytes` that should stay free."""

    fidelity: str
    """Lowest fidelity that the user allows."""

    objective: str
    """`speed`, `memory` or `cost`."""

    steps: int | None = None
    """Length of the run over which the start-up is spread; None if it was not given."""

    front: tuple[Choice, ...]
    """Pareto front: no other recipe is both as fast and as small. The fastest comes first.

    JSON and pages list the recipes that fit first. A recipe smaller than a faster one by less than 3 % or
    160 MiB may be missing; the answer never is. Recipes slower than the answer by `SLOWEST` times are
    missing too, unless the whole front was requested.
    """

    best: Choice | None
    """Best recipe by the objective among those that fit and leave the headroom.

    If none leaves the headroom, the smallest recipe that fits. None if nothing fits.
    """

    ranked: tuple[Choice, ...] = ()
    """Best recipes that fit and differ in their seconds, as many as requested, the best first."""

    reasons: tuple[Reason, ...] = ()
    """Reasons for the best recipe, or for the nearest miss, by slot."""

    kept: tuple[KeptSlot, ...] = ()
    """Slots that the search left unchanged."""

    start: Start | None = None
    """The recipe from which the user started, with the plan's changes; None without one."""

    cures: tuple[str, ...] = ()
    """Changes that would make a recipe fit; empty if one fits."""

    ways_out: WaysOut | None = None
    """The cheapest changes of the nearest miss that fit; None if a recipe fits, or if they were not
    computed."""

    refused: tuple[Exclusion, ...] = ()
    """Techniques that were not considered."""

    counts: Counts
    """Size of the search."""

    verified: bool | None = None
    """True if a full simulation of the best recipe (or the nearest miss) gave the same figures."""

    timing: Pace | None = None
    """Timing of the best recipe (or the nearest miss); None if the GPU's rates are unknown."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the packages that computed the plan."""

    doubts: tuple[str, ...] = ()
    """Sentences on the uncertain parts of the plan."""

    @property
    def fits(self) -> bool:
        """True if any recipe fits the memory."""
        return self.best is not None

    @property
    def tight(self) -> bool:
        """True if the best recipe leaves less than the headroom."""
        return self.best is not None and self.is_tight(self.best)

    def is_tight(self, choice: Choice) -> bool:
        """Return True if a recipe fits but leaves less than the requested free memory (headroom)."""
        return self.fitting(choice) and self.spare_bytes(choice) < self.headroom_bytes

    def fitting(self, choice: Choice) -> bool:
        """Return True if a recipe fits into the memory."""
        return self.spare_bytes(choice) >= 0

    @property
    def fitting_first(self) -> list[Choice]:
        """The Pareto front of recipes, with those that fit before the rest."""
        return sorted(self.front, key=self.fitting, reverse=True)

    def spare_bytes(self, choice: Choice) -> float:
        """Return the bytes of memory that a recipe leaves free; infinite without a limit."""
        return math.inf if self.memory_bytes is None else self.memory_bytes - choice.needed_bytes

    def timed(self, choice: Choice) -> StepSpeed:
        """Return the speed of a step of one recipe of the plan.

        The bound of the step and its MFU are known for the answer alone.
        """
        seconds, known = choice.step_seconds, self.timing
        measured = known.measured_rates if known else None
        if known is None or choice != self.best_or_nearest:
            return speed_of(seconds, self.job, measured_rates=measured)
        mfu = known.peak_seconds / seconds if known.peak_seconds and seconds else None
        return speed_of(seconds, self.job, measured_rates=measured, bound=known.bound, mfu=mfu)

    def speed(self, choice: Choice) -> float:
        """Return samples per second of one recipe of the plan, with the start-up if the run's length was
        given."""
        pace = choice.pace(self.steps)
        return self.job.batch_size / pace if pace else 0.0

    @property
    def nearest(self) -> Choice:
        """The nearest miss when nothing fits: the fastest recipe that is nearly as small as the smallest.

        With the objective `memory` it is the smallest recipe.
        """
        return self.front[nearest_miss([choice.needed_bytes for choice in self.front], self.objective)]

    @property
    def best_or_nearest(self) -> Choice:
        """The best recipe, or the nearest miss."""
        return self.best or self.nearest

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row per recipe of the Pareto front: those that fit first, each group from the fastest
        on.
        """
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

    def derived_keys(self) -> dict[str, Any]:
        """Return derived values of the document: the fit, the order of the Pareto front, the nearest miss and
        the speed.
        """
        keys: dict[str, Any] = {"fits": self.fits, "tight": self.tight, "front": encode(self.fitting_first)}
        keys["nearest_miss"] = None if self.best else encode(self.nearest)
        if self.timing:
            keys["timing"] = asdict(self.timing) | asdict(self.timed(self.best_or_nearest))
        return keys

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the plan that `to_json` wrote. Raises `UsageError` for any other document."""
        plan = super().from_json(document)
        # The document lists fitting recipes first; a front begins with the fastest, which may not fit.
        return replace(plan, front=tuple(sorted(plan.front, key=plan.fitting)))
