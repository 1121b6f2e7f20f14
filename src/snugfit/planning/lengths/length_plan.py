"""The answer about a dataset's lengths: each way of padding, what it takes, and which is best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from snugfit.data.lengths import Lengths
from snugfit.documents import decode_fields, encode, encode_fields
from snugfit.errors import UsageError
from snugfit.job.gpu import Gpu
from snugfit.job.job import Job
from snugfit.planning.lengths.padding import Way
from snugfit.planning.lengths.sizes import Size
from snugfit.prediction.rates import knows_alignment
from snugfit.techniques.recipe import Recipe

SCHEMA = 1
AS_FAST = 0.01
"""Of the best samples per second: what is less than this from it is as fast, and the simpler is chosen."""

SIMPLEST = ("random", "grouped", "fixed")


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The same job on sequences that are cut: another job."""

    at: int
    """Tokens of a sequence, at most."""

    samples: float
    """Share of the samples that are cut."""

    tokens: float
    """Share of the tokens that are lost."""

    ways: tuple[Way, ...]
    """What each way of padding takes then."""


@dataclass(frozen=True, kw_only=True)
class LengthPlan:
    """What a dataset's lengths mean for a job under a recipe on a GPU."""

    job: Job
    """With the longest sequence."""

    recipe: Recipe
    """How it is trained."""

    gpu: Gpu
    """The GPU that it is trained on."""

    loop: str
    """Which loop trains it."""

    memory_bytes: int | None
    """What may be used."""

    lengths: Lengths
    """How long the dataset's samples are."""

    ways: tuple[Way, ...]
    """Each way of padding; empty when the model does not take the longest sequence."""

    headroom_bytes: int = 0
    """How many of them should stay free."""

    cut: Cut | None = None
    """When a truncation was asked for."""

    sizes: tuple[Size, ...] = ()
    """Sizes that are slow on the device."""

    bound: str = ""
    """What bounds the step of the longest batch."""

    steps: int = 0
    """Steps that were drawn for each way."""

    rehearsed: int = 0
    """Lengths that were rehearsed; the seconds of the others follow from theirs."""

    off: float = 0.0
    """By how much the seconds that follow were found off, at most."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Packages that it was made with."""

    doubts: tuple[str, ...] = ()
    """What is less certain than the rest."""

    def fits(self, way: Way) -> bool | None:
        """Whether this way fits; None when it cannot be, or no memory was named."""
        if way.needed_bytes is None or self.memory_bytes is None:
            return None
        return way.needed_bytes <= self.memory_bytes

    def is_tight(self, way: Way) -> bool:
        """Whether this way fits and leaves less than the headroom."""
        return bool(self.fits(way)) and self.spare_bytes(way) < self.headroom_bytes

    def spare_bytes(self, way: Way) -> int:
        """Bytes that this way leaves of the memory; negative where it does not fit."""
        return (self.memory_bytes or 0) - (way.needed_bytes or 0)

    @property
    def best(self) -> Way | None:
        """The fastest that fits and leaves the headroom; where none leaves it, that fits. Among those as fast
        the simplest. None when none fits."""
        fitting = [way for way in self.ways if self.fits(way) is not False]
        return _best([way for way in fitting if not self.is_tight(way)]) or _best(fitting)

    @property
    def is_assumed(self) -> bool:
        """Whether the best is better than less rounding of lengths only by a price of unaligned rows that is
        assumed."""
        best = self.best
        if best is None or best.aligned_step_seconds is None or knows_alignment(self.gpu):
            return False
        return any(
            (way.aligned_step_seconds or 0) <= best.aligned_step_seconds * (1 + AS_FAST)
            for way in self.ways
            if way.order == best.order and way.multiple < best.multiple and self.fits(way) is not False
            if way.step_seconds and way.step_seconds > (best.step_seconds or 0) * (1 + AS_FAST)
        )

    def to_json(self) -> dict[str, Any]:
        """The document that `snugfit lengths --json` prints."""
        ways = [encode_fields(way, fits=self.fits(way)) for way in self.ways]
        fits = self.fits(self.best) if self.best else False if ways else None
        derived = {"fits": fits, "ways": ways, "best": encode(self.best), "assumed": self.is_assumed}
        return {"schema": SCHEMA, "what": "lengths", **encode_fields(self, **derived)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The plan that `to_json` wrote. Raises `UsageError` for anything else."""
        if document.get("what") != "lengths" or document.get("schema") != SCHEMA:
            raise UsageError("This is not an answer about lengths of this version of snugfit.")
        try:
            return decode_fields(cls, document)
        except (KeyError, TypeError, ValueError) as damaged:
            raise UsageError(f"This answer about lengths is damaged: {damaged}.") from None


def _best(ways: Sequence[Way]) -> Way | None:
    known = [way for way in ways if way.samples_per_second]
    if not known:
        return None
    most = max(way.samples_per_second or 0.0 for way in known)
    as_fast = [way for way in known if (way.samples_per_second or 0.0) >= most * (1 - AS_FAST)]
    return min(as_fast, key=lambda way: (SIMPLEST.index(way.order), way.multiple))
