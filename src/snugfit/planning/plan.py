"""Results of a plan: the best recipe, alternatives, excluded techniques, and the reasons for each."""

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

EXTRA_BYTES_SHARE = 0.03
"""Share by which the recipe shown when nothing fits may need more bytes than the smallest recipe (chosen).
Slightly fewer bytes are not worth half the speed.
"""

SLOWEST = 5
"""Largest seconds per step of a listed recipe, as a multiple of the best recipe's seconds (chosen). The
smallest recipes recompute every layer and use many micro-batches. Without this limit, the search for them
took a third of a plan's time.
"""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A recipe of a plan, with its memory in bytes and its seconds per step."""

    recipe: str
    """Recipe as text, such as `bf16 + every_layer`."""

    requested_bytes: int
    """Peak of the bytes that tensors and kernels request from the allocator."""

    allocated_bytes: int
    """Peak of the requested bytes after the allocator's rounding."""

    reserved_bytes: int
    """Peak of the bytes that the allocator reserves on the device."""

    context_bytes: int
    """Bytes of CUDA's context and libraries, outside the allocator."""

    step_seconds: float
    """Seconds of a step after the first ones (steps without start-up work)."""

    samples_per_second: float
    """Global batch size divided by `step_seconds`."""

    once_seconds: float = 0.0
    """Seconds of start-up, from the start of the process until steps have their final speed."""

    def __post_init__(self) -> None:
        Recipe.parse(self.recipe)

    @property
    def needed_bytes(self) -> int:
        """Bytes that must be free on the GPU: reserved memory and CUDA context."""
        return self.reserved_bytes + self.context_bytes

    def pace(self, steps: int | None) -> float:
        """Return the seconds of a step plus its share of the start-up in a run of `steps` steps.

        Without a run length, return the seconds of a step alone.
        """
        return self.step_seconds + (self.once_seconds / steps if steps else 0.0)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The bottleneck of a recipe's step, and the seconds that the step would take at the GPU's peak
    FLOP/s."""

    bound: str
    """Bottleneck of the step, such as `host` or `link` (`StepSeconds.bound`)."""

    measured_rates: bool
    """True if the GPU's rates (speeds of kernels) were measured on this model of GPU."""

    peak_seconds: float
    """Seconds of the model's FLOPs at the data sheet's peak; 0 if the peak is unknown."""

    assumed_host: bool = True
    """False if the host was calibrated (`StepSeconds.assumed_host`)."""

    host_seconds: float = 0.0
    """Seconds of the step in which the host works, without its waits for the device."""


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """A technique that the search excluded, and the reason."""

    what: str
    """Excluded technique or recipe as text, such as `lora(r=8)`."""

    why: str
    """Reason for the exclusion, as text that helps the user to change it."""

    recipes: int = 0
    """Number of recipes with the technique that were excluded; 0 if they were never generated."""


@dataclass(frozen=True, kw_only=True)
class KeptSlot:
    """A slot (a choice of the recipe, such as precision) that the search left as the user set it."""

    slot: str
    """The slot's name, such as `precision`."""

    techniques: tuple[str, ...]
    """Candidates of this slot: the fixed technique, then others of its family (the same algorithm in other
    kernels)."""

    why: str
    """Reason why the slot is fixed, and the option that frees it."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Change of the user's recipe in one slot (such as the optimizer), with the bytes and seconds per step
    that result.
    """

    slot: str
    """The slot's name, such as `optimizer`."""

    theirs: str
    """Technique of the user's recipe in this slot."""

    ours: str
    """Technique of the plan's recipe in this slot."""

    needed_bytes: int | None = None
    """Bytes needed by the user's recipe with this change alone; None if that recipe is invalid."""

    step_seconds: float | None = None
    """Seconds of a step of the user's recipe with this change alone; None if that recipe is invalid."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """The user's recipe with its bytes and seconds, and the changes that the plan proposes."""

    recipe: str
    """The user's recipe as text, such as `bf16 + every_layer`."""

    needed_bytes: int | None = None
    """Bytes that must be free on the GPU; None if the recipe cannot run."""

    step_seconds: float | None = None
    """Seconds of a step, after the first ones; None if the recipe cannot run."""

    why_not: str = ""
    """Reason why the recipe cannot run."""

    changes: tuple[Change, ...] = ()
    """The plan's changes to this recipe, one for each slot; empty if there are none."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """The reason for the best recipe's technique in one slot (a choice of the recipe, such as the
    optimizer).
    """

    slot: str
    """The slot's name, such as `optimizer`."""

    chosen: str
    """The best recipe's technique in this slot."""

    against: str
    """Technique with which `chosen` is compared: the slot's plain (default) technique.

    If that is the chosen one or unavailable, the fastest other technique.
    """

    needed_bytes: int | None = None
    """GPU bytes needed by the recipe with `against` in place of `chosen`; None if it cannot run."""

    step_seconds: float | None = None
    """Seconds of a step of the recipe with `against` in place of `chosen`."""

    once_seconds: float | None = None
    """Seconds of start-up of the recipe with `against` in place of `chosen`."""

    why_not: str = ""
    """Reason why the recipe with `against` cannot run."""

    kept: str = ""
    """Reason why the slot was not searched, and the option that frees it. `against` is then empty."""

    because: str = ""
    """Cause of the difference in seconds per step between both recipes; empty if unknown."""

    is_estimated: bool = False
    """True if the recipe with `against` was not compiled. Its bytes and seconds are then estimated from lower
    bounds of uncompiled recipes."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of recipes that the search considered, computed lower bounds for, and simulated."""

    recipes: int
    """Number of valid recipes among which the search chose."""

    tapes: int  # the key of the JSON document keeps this name
    """Number of different traces (allocations and kernels of a step) of these recipes. Allocator, fp32
    precision and data loader do not change a trace."""

    footprints: int
    """Number of different lower bounds of needed bytes among the recipes."""

    passes: int
    """Number of different forward and backward passes that were simulated, on few layers if the model allows
    it.
    """

    replayed: int
    """Number of recipes whose whole step was simulated, timed and replayed through the allocator."""


def nearest_miss(front_bytes: Sequence[int], objective: str) -> int:
    """Return the index of the recipe to show when nothing fits.

    `front_bytes` are the needed bytes along a Pareto front, in descending order from the fastest recipe to
    the smallest.
    """
    if objective == "memory":
        return len(front_bytes) - 1
    most = front_bytes[-1] * (1 + EXTRA_BYTES_SHARE)
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
    """Bytes of GPU memory that may be used; None for no limit."""

    headroom_bytes: int = 0
    """Bytes of `memory_bytes` that should stay free."""

    fidelity: str
    """Lowest fidelity (numerical closeness to the plain step) that the user allows."""

    objective: str
    """Criterion for the best recipe: `speed`, `memory` or `cost`."""

    steps: int | None = None
    """Length of the training run in steps, over which the start-up is spread; None if it was not given."""

    front: tuple[Choice, ...]
    """Pareto front of the recipes: no other recipe is both as fast and as small. The fastest comes first.

    JSON and pages list the recipes that fit first. A recipe smaller than a faster one by less than 3 % or 160
    MiB may be missing; the best recipe never is. Recipes slower than `SLOWEST` times the best are missing
    too, unless the whole front was requested.
    """

    best: Choice | None
    """Best recipe by the objective among those that fit and leave the headroom.

    If none leaves the headroom, it is the smallest recipe that fits. It is None if nothing fits.
    """

    ranked: tuple[Choice, ...] = ()
    """The requested number of best recipes that fit, the best first; of recipes with equal seconds only
    one."""

    reasons: tuple[Reason, ...] = ()
    """Reasons for each technique of the best recipe, by slot. If nothing fits, they are for the recipe shown
    instead.
    """

    kept: tuple[KeptSlot, ...] = ()
    """Slots (choices of a recipe, such as precision) that the search left unchanged."""

    start: Start | None = None
    """The user's recipe that the plan improves, and the plan's changes to it; None without one."""

    cures: tuple[str, ...] = ()
    """Sentences on changes of job or GPU with which a recipe would fit; empty if one fits."""

    ways_out: WaysOut | None = None
    """Smallest changes that make the recipe closest to fitting fit. None if a recipe fits, or if they were
    not computed.
    """

    refused: tuple[Exclusion, ...] = ()
    """Techniques that the search excluded, each with the reason for its exclusion."""

    counts: Counts
    """Numbers of recipes that the search considered and simulated."""

    verified: bool | None = None
    """True if a full simulation gave the same bytes. It simulates the best recipe, or the one closest to
    fitting.
    """

    timing: Pace | None = None
    """Bottleneck of the best recipe's step, or of the recipe closest to fitting; None if the GPU's rates are
    unknown.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the packages that computed the plan."""

    doubts: tuple[str, ...] = ()
    """Warnings about the accuracy of the plan's bytes and seconds."""

    @property
    def fits(self) -> bool:
        """True if any recipe fits the memory."""
        return self.best is not None

    @property
    def tight(self) -> bool:
        """True if the best recipe leaves less memory free than the requested headroom."""
        return self.best is not None and self.is_tight(self.best)

    def is_tight(self, choice: Choice) -> bool:
        """Return True if a recipe fits but leaves less than the requested free memory (headroom)."""
        return self.fitting(choice) and self.spare_bytes(choice) < self.headroom_bytes

    def fitting(self, choice: Choice) -> bool:
        """Return True if a recipe's needed bytes fit into the memory."""
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

        Only the best recipe's speed (or the nearest miss's) contains the bottleneck and the MFU.
        """
        seconds, known = choice.step_seconds, self.timing
        measured = known.measured_rates if known else None
        if known is None or choice != self.best_or_nearest:
            return speed_of(seconds, self.job, measured_rates=measured)
        mfu = known.peak_seconds / seconds if known.peak_seconds and seconds else None
        return speed_of(
            seconds,
            self.job,
            measured_rates=measured,
            bound=known.bound,
            mfu=mfu,
            assumed_host=known.assumed_host,
            host_seconds=known.host_seconds,
        )

    def speed(self, choice: Choice) -> float:
        """Return samples per second of one recipe of the plan, with the start-up if the run's length was
        given."""
        pace = choice.pace(self.steps)
        return self.job.batch_size / pace if pace else 0.0

    @property
    def nearest(self) -> Choice:
        """The recipe closest to fitting when nothing fits: the fastest one that is nearly as small as the
        smallest.

        With the objective `memory` it is the smallest recipe.
        """
        return self.front[nearest_miss([choice.needed_bytes for choice in self.front], self.objective)]

    @property
    def best_or_nearest(self) -> Choice:
        """The best recipe, or the nearest miss if nothing fits."""
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
        """Return values that the JSON document contains beyond the fields: the fit, the sorted Pareto front,
        the nearest miss, the speed.
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
        # The JSON document lists fitting recipes first. The front begins with the fastest, which may not fit.
        return replace(plan, front=tuple(sorted(plan.front, key=plan.fitting)))
