"""Technique for the key-value cache in text generation: it selects one of transformers' cache types.

`static` allocates all its bytes in the first forward pass. `quantized` takes half of the bytes of a 16-bit
cache. There, each decode step dequantizes the cache of one layer after another to 16 bits.
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
    """Selects the type of key-value cache for text generation, in place of the job's."""

    title: ClassVar = "cache of keys and values"
    fidelity: ClassVar = Fidelity.ROUNDS
    source: ClassVar = "transformers.GenerationConfig(cache_implementation=...)"

    kind: str
    """Kind of the cache, as `--cache` has it: `static`, `quantized` or another."""

    def install(self, setup: Setup) -> Setup:
        """Return the setup with this type of key-value cache."""
        return setup.with_fields(**{CACHE.name: self.kind})

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield the reasons against this technique: a job without text generation, or a model without such a
        cache.
        """
        if job.phase != "generate":
            yield f"the phase {job.phase} has no cache of keys and values. Leave it out."
        elif reason := _lack(job, self.kind):
            yield reason

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """Return the reason why a plan may not change the cache type: the job names one, or does not generate
        text.
        """
        if job.phase != "generate":
            return f"the phase {job.phase} has no cache of keys and values"
        if (named := GenerationSettings.of(job).cache) != CACHES[0]:
            return f"the job has --cache {named}"
        return ""

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield the technique with each type of key-value cache that the model supports, except for the
        default.
        """
        if job.phase == "generate":
            yield from (cls(kind=kind) for kind in CACHES[1:] if not _lack(job, kind))


def _lack(job: Job, kind: str) -> str:
    """Return the reason why generation with this type of key-value cache fails; empty if it works."""
    try:
        GenerationSettings.complete(job, {**job.phase_settings, "cache": kind})
    except JobError as error:
        return str(error)
    return ""
