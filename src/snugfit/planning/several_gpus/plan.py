"""The answer: for each number of GPUs the fastest recipe that fits them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from snugfit.documents import decode_fields, encode_fields
from snugfit.job.gpu import Gpu
from snugfit.job.job import Job
from snugfit.planning.plan import Exclusion, KeptSlot
from snugfit.results.frame import Tabular

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class OnGpus:
    """A recipe on so many GPUs, and what it takes."""

    gpus: int
    """How many train together."""

    recipe: str
    """In the notation of recipes."""

    needed_bytes: int
    """What must be free on each of them."""

    step_seconds: float
    """Seconds of the steady step."""

    samples_per_second: float
    """Global batch over `step_seconds`."""

    scaling_efficiency: float | None = None
    """The share of the step that it would take if exchanges between GPUs took no time; None on one GPU."""

    bound: str = ""
    """What bounds the step (`StepSeconds.bound`)."""

    fits: bool = True
    """Whether it fits; else it is the nearest miss."""

    why: str = ""
    """Where groups of GPUs work on the same samples: what they share, and why. Where some of the layers are
    recomputed: how many, and why. Where another recipe is predicted to be a little faster: why this is the
    answer. Empty elsewhere."""

    host_share: float | None = None
    """The share of the step in which the host works (`StepSeconds.host_seconds`)."""

    @property
    def gpu_seconds(self) -> float:
        """Seconds of a step times GPUs: what a step costs, at whatever price."""
        return self.gpus * self.step_seconds


@dataclass(frozen=True, kw_only=True)
class SeveralGpusPlan(Tabular):
    """The fastest recipe for each number of GPUs."""

    job: Job
    gpu: Gpu
    """The kind that all of them are."""
    memory_bytes: int
    """What may be used of each."""
    headroom_bytes: int
    """How much of it stays free."""
    fidelity: str
    """The least exact that was allowed."""
    answers: tuple[OnGpus, ...]
    """For each number of GPUs, in order: the fastest that fits, or the nearest miss."""
    alternatives: tuple[OnGpus, ...] = ()
    """On the fastest answer's GPUs: what else was simulated in full, the fastest first. The first may be
    faster than the answer by a little, which then says why."""
    kept_slots: tuple[KeptSlot, ...] = ()
    """Slots that were not searched."""
    refused: tuple[Exclusion, ...] = ()
    """What was not considered, and why."""
    screened: int = 0
    """How many recipes were simulated on few layers, or in full where the model has no such layers."""
    doubts: tuple[str, ...] = ()
    """Sentences on what is uncertain in the answers."""
    price_per_hour: float | None = None
    """USD of one GPU for an hour, where the user gave a price."""
    versions: Mapping[str, str]
    """Package versions that the search ran with."""

    @property
    def fitting(self) -> tuple[OnGpus, ...]:
        """The answers that fit."""
        return tuple(answer for answer in self.answers if answer.fits)

    @property
    def fastest(self) -> OnGpus | None:
        """The answer with the shortest step; None where nothing fits."""
        return min(self.fitting, key=lambda one: (one.step_seconds, one.gpus), default=None)

    @property
    def fewest(self) -> OnGpus | None:
        """The answer on the fewest GPUs."""
        return min(self.fitting, key=lambda one: one.gpus, default=None)

    def usd_per_1000_samples(self, one: OnGpus) -> float | None:
        """What 1,000 samples cost on the GPUs of an answer; None where the user gave no price."""
        if self.price_per_hour is None or not one.samples_per_second:
            return None
        return self.price_per_hour / 3600 * one.gpus * 1000 / one.samples_per_second

    @property
    def cheapest(self) -> OnGpus | None:
        """The answer whose steps cost least, where each GPU costs the same."""
        return min(self.fitting, key=lambda one: (one.gpu_seconds, one.gpus), default=None)

    def to_rows(self) -> list[dict[str, Any]]:
        """The answers, a row each."""
        return [asdict(answer) for answer in self.answers]

    def to_json(self) -> dict[str, Any]:
        """The document that `snugfit plan --gpus ... --json` prints."""
        named = {name: one and one.gpus for name, one in self._by_name().items()}
        return {"schema": SCHEMA, "what": "plan for several GPUs", **encode_fields(self, **named)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The plan that `to_json` wrote."""
        return decode_fields(cls, document)

    def _by_name(self) -> dict[str, OnGpus | None]:
        return {"fastest": self.fastest, "fewest": self.fewest, "cheapest": self.cheapest}
