"""Technique for the cache of keys and values: the types of transformers' caches, for plans of generation.

`static` has all its bytes from the first pass on. `quantized` has half of the bytes of 16-bit numbers. There
each step converts the cache of one layer after another to numbers of 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from snugfit.errors import JobError
from snugfit.features.inference.fields import CACHE
from snugfit.features.inference.settings import CACHES, GenerationSettings
from snugfit.techniques.technique import Fidelity, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job
    from snugfit.techniques.setup import Setup


@dataclass(frozen=True, kw_only=True)
class KvCache(Technique):
    """Stores keys and values of earlier tokens in another type of cache than the job names."""

    title: ClassVar = "cache of keys and values"
    fidelity: ClassVar = Fidelity.ROUNDS
    source: ClassVar = "transformers.GenerationConfig(cache_implementation=...)"

    kind: str
    """Kind of the cache, as `--cache` has it: `static`, `quantized` or another."""

    def install(self, setup: Setup) -> Setup:
        """Set the type of the key-value cache in the Setup."""
        return setup.with_fields(**{CACHE.name: self.kind})

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield an objection to another phase, and to a model without such a cache."""
        if job.phase != "generate":
            yield f"the phase {job.phase} has no cache of keys and values. Leave it out."
        elif why := _lack(job, self.kind):
            yield why

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """Return the reason why a plan may not change the cache: the job names one, or does not generate."""
        if job.phase != "generate":
            return f"the phase {job.phase} has no cache of keys and values"
        if (named := GenerationSettings.of(job).cache) != CACHES[0]:
            return f"the job has --cache {named}"
        return ""

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield each type of cache that the model can have, except for the default."""
        if job.phase == "generate":
            yield from (cls(kind=kind) for kind in CACHES[1:] if not _lack(job, kind))


def _lack(job: Job, kind: str) -> str:
    """Return the error of a generation with this type of cache; empty without one."""
    try:
        GenerationSettings.complete(job, {**job.phase_settings, "cache": kind})
    except JobError as error:
        return str(error)
    return ""
