"""Memory and step time of each way to pad a dataset, and the best way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from snugfit.documents import JsonDocument, encode, encode_fields
from snugfit.features.lengths.dataset import Lengths
from snugfit.features.lengths.padding import Way
from snugfit.features.lengths.sizes import Size
from snugfit.job.gpu import Gpu
from snugfit.job.job import Job
from snugfit.planning.plan import Plan
from snugfit.prediction.rates import knows_alignment
from snugfit.techniques.recipe import Recipe

EQUAL_SPEED = 0.01
"""Greatest relative difference to the best samples per second that counts as equally fast. Among such ways of
padding, the simplest is chosen.
"""

SIMPLEST = ("random", "grouped", "fixed")


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Memory and step time with sequences truncated to a length, which changes the learned model."""

    at: int
    """Largest number of tokens in a sequence; longer ones are truncated."""

    samples: float
    """Share of the samples that are truncated, from 0 to 1."""

    tokens: float
    """Share of all tokens that are lost, from 0 to 1."""

    ways: tuple[Way, ...]
    """Results of each way of padding for the truncated sequences."""


@dataclass(frozen=True, kw_only=True)
class LengthPlan(JsonDocument):
    """Memory and step time of each way to pad a dataset, for a job under a recipe on a GPU."""

    what: ClassVar = "lengths"

    added_keys: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "fits": (
            bool | None,
            "True if the longest batch fits in at least one way; null without a memory limit or ways.",
        ),
        "best": (Way | None, ""),
        "assumed": (bool, "True if the best way gains only by an assumed cost of unaligned rows."),
    }
    """JSON keys that `to_json` adds, with their types and descriptions."""

    job: Job
    """The training job, with the dataset's longest sequence as its length."""

    recipe: Recipe
    """Recipe under which the ways of padding are compared."""

    gpu: Gpu
    """GPU that the predictions are for."""

    loop: str
    """Name of the training loop."""

    memory_bytes: int | None
    """Usable bytes of the GPU; None for no limit."""

    lengths: Lengths
    """Lengths of the dataset's samples."""

    ways: tuple[Way, ...]
    """Results of each way of padding; empty if the model does not accept the longest sequence."""

    headroom_bytes: int = 0
    """Bytes of `memory_bytes` that the plan keeps free."""

    cut: Cut | None = None
    """Results for truncated sequences; None if no truncation was requested."""

    sizes: tuple[Size, ...] = ()
    """Sizes of the job or model that slow down its kernels, with faster ones."""

    bound: str = ""
    """Resource that limits the step with the longest batch."""

    steps: int = 0
    """Number of training steps drawn at random for each way of padding."""

    rehearsed: int = 0
    """Number of simulated sequence lengths. Seconds of all others are interpolated."""

    off: float = 0.0
    """Greatest relative error of interpolated seconds, at the tested lengths."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the packages that computed the plan, by package name."""

    doubts: tuple[str, ...] = ()
    """Warnings about uncertain parts of the result."""

    def fits(self, way: Way) -> bool | None:
        """Return True if the step fits into memory with this way of padding. Return None if the model does
        not accept the length, or without a memory limit.
        """
        if way.needed_bytes is None or self.memory_bytes is None:
            return None
        return way.needed_bytes <= self.memory_bytes

    def is_tight(self, way: Way) -> bool:
        """Return True if the step with this way of padding fits, but leaves less memory free than
        `headroom_bytes`.
        """
        return bool(self.fits(way)) and self.spare_bytes(way) < self.headroom_bytes

    def spare_bytes(self, way: Way) -> int:
        """Return the bytes of memory that this way of padding leaves free; negative if it does not fit."""
        return (self.memory_bytes or 0) - (way.needed_bytes or 0)

    @property
    def best(self) -> Way | None:
        """The fastest way of padding that fits and leaves the headroom free. If none leaves it, the fastest
        that fits.

        Among equally fast ways it is the simplest. None if no way fits.
        """
        fitting = [way for way in self.ways if self.fits(way) is not False]
        return _best([way for way in fitting if not self.is_tight(way)]) or _best(fitting)

    @property
    def is_assumed(self) -> bool:
        """True if the best way of padding gains time only by aligned rows (a multiple of 16 bytes). Their
        gain is assumed, not measured.
        """
        best = self.best
        if best is None or best.aligned_step_seconds is None or knows_alignment(self.gpu):
            return False
        return any(
            (way.aligned_step_seconds or 0) <= best.aligned_step_seconds * (1 + EQUAL_SPEED)
            for way in self.ways
            if way.order == best.order and way.multiple < best.multiple and self.fits(way) is not False
            if way.step_seconds and way.step_seconds > (best.step_seconds or 0) * (1 + EQUAL_SPEED)
        )

    def derived_keys(self) -> dict[str, Any]:
        """Return computed keys of the JSON document: `fits`, `ways` of padding, the `best` one and
        `assumed`.
        """
        ways = [encode_fields(way, fits=self.fits(way)) for way in self.ways]
        fits = self.fits(self.best) if self.best else False if ways else None
        return {"fits": fits, "ways": ways, "best": encode(self.best), "assumed": self.is_assumed}


@dataclass(frozen=True, kw_only=True)
class PlanWithLengths(Plan):
    """A plan for the longest batch of a dataset, with the ways of padding under its best recipe."""

    lengths: LengthPlan
    """Results of each way of padding under the plan's best recipe."""


def _best(ways: Sequence[Way]) -> Way | None:
    known = [way for way in ways if way.samples_per_second]
    if not known:
        return None
    most = max(way.samples_per_second or 0.0 for way in known)
    as_fast = [way for way in known if (way.samples_per_second or 0.0) >= most * (1 - EQUAL_SPEED)]
    return min(as_fast, key=lambda way: (SIMPLEST.index(way.order), way.multiple))
