"""The plan for several GPUs: the fastest recipe that fits, for each number of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Self

from snugfit.documents import decode_fields, encode_fields
from snugfit.job.gpu import Gpu
from snugfit.job.job import Job
from snugfit.planning.plan import Exclusion, KeptSlot
from snugfit.results.frame import Tabular

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class OnGpus:
    """A recipe on a number of GPUs, with its figures."""

    gpus: int
    """Number of GPUs that train together."""

    recipe: str
    """Recipe in the notation of recipes."""

    needed_bytes: int
    """Bytes that must be free on each of them."""

    step_seconds: float
    """Seconds of the steady step."""

    samples_per_second: float
    """Samples of the global batch per second."""

    scaling_efficiency: float | None = None
    """Share of the step's seconds that would remain without exchanges between GPUs; None on one GPU."""

    bound: str = ""
    """Resource that bounds the step (`StepSeconds.bound`)."""

    fits: bool = True
    """True if it fits; otherwise it is the nearest miss."""

    why: str = ""
    """Reason for the recipe; empty if it needs none.

    It explains groups of GPUs that work on the same samples, and their sharing. It explains a part of the
    layers that is recomputed, with their number. It explains the choice if another recipe is predicted to
    be slightly faster.
    """

    host_share: float | None = None
    """Share of the step in which the host works (`StepSeconds.host_seconds`)."""

    @property
    def gpu_seconds(self) -> float:
        """Seconds of a step times GPUs: the cost of a step at any price."""
        return self.gpus * self.step_seconds


@dataclass(frozen=True, kw_only=True)
class SeveralGpusPlan(Tabular):
    """A plan for several GPUs: the fastest recipe for each number of them."""

    added_keys: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "what": (Literal["plan for several GPUs"], "Name of the document."),
        "fewest": (int | None, "The fewest GPUs that fit; null where none do."),
        "fastest": (int | None, "The number of GPUs with the shortest step."),
        "cheapest": (int | None, "The number of GPUs with the fewest GPU seconds a step."),
    }
    """Keys that `to_json` adds, with types and sentences."""

    job: Job
    gpu: Gpu
    """The kind of all GPUs."""
    memory_bytes: int
    """Usable bytes of each GPU."""
    headroom_bytes: int
    """Bytes of `memory_bytes` that stay free."""
    fidelity: str
    """Lowest fidelity that was allowed."""
    answers: tuple[OnGpus, ...]
    """Fastest recipe that fits, or the nearest miss, for each number of GPUs, in order."""
    alternatives: tuple[OnGpus, ...] = ()
    """Other full simulations on the fastest answer's GPUs, the fastest first.

    The first may be slightly faster than the answer, which then has the reason in `why`.
    """
    kept_slots: tuple[KeptSlot, ...] = ()
    """Slots that the search left unchanged."""
    refused: tuple[Exclusion, ...] = ()
    """Techniques that were not considered, with the reasons."""
    screened: int = 0
    """Number of recipes simulated on few layers, or in full if the model has no such layers."""
    doubts: tuple[str, ...] = ()
    """Sentences on the uncertain parts of the answers."""
    price_per_hour: float | None = None
    """USD of one GPU for an hour, if the user gave a price."""
    versions: Mapping[str, str]
    """Package versions that the search used."""

    @property
    def fitting(self) -> tuple[OnGpus, ...]:
        """The answers that fit."""
        return tuple(answer for answer in self.answers if answer.fits)

    @property
    def fastest(self) -> OnGpus | None:
        """The answer with the shortest step; None if nothing fits."""
        return min(self.fitting, key=lambda one: (one.step_seconds, one.gpus), default=None)

    @property
    def fewest(self) -> OnGpus | None:
        """The answer on the fewest GPUs."""
        return min(self.fitting, key=lambda one: one.gpus, default=None)

    def usd_per_1000_samples(self, one: OnGpus) -> float | None:
        """Return the cost of 1,000 samples on the GPUs of an answer in USD; None if the user gave no
        price."""
        if self.price_per_hour is None or not one.samples_per_second:
            return None
        return self.price_per_hour / 3600 * one.gpus * 1000 / one.samples_per_second

    @property
    def cheapest(self) -> OnGpus | None:
        """The answer with the cheapest steps, if all GPUs cost the same."""
        return min(self.fitting, key=lambda one: (one.gpu_seconds, one.gpus), default=None)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return the answers, one row each."""
        return [asdict(answer) for answer in self.answers]

    def to_json(self) -> dict[str, Any]:
        """Return the document that `snugfit plan --gpus ... --json` prints."""
        named = {name: one and one.gpus for name, one in self._by_name().items()}
        return {"schema": SCHEMA, "what": "plan for several GPUs", **encode_fields(self, **named)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the plan that `to_json` wrote."""
        return decode_fields(cls, document)

    def _by_name(self) -> dict[str, OnGpus | None]:
        return {"fastest": self.fastest, "fewest": self.fewest, "cheapest": self.cheapest}
