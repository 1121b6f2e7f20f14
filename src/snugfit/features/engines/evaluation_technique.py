"""The base class of techniques that change only evaluation and text generation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from snugfit.features.engines.fields import RUNTIME
from snugfit.techniques.setup import Setup
from snugfit.techniques.technique import Fidelity, Slot, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job

EXPORTED_MODELS = "transformers>=5.23"
"""First version of transformers whose exported models can be loaded and called (`ExportedModel`)."""

ONLY_PLAIN = (Slot.ADAPTERS, Slot.ATTENTION, Slot.CACHE, Slot.MATMUL, Slot.BATCHING)
"""Slots (groups of alternative techniques) that change a model or its calls. Other engines were tested only
with their defaults."""


@dataclass(frozen=True, kw_only=True)
class EvaluationTechnique(Technique):
    """Runs a model's forward pass in evaluation by other code than the model's own."""

    fidelity: ClassVar = Fidelity.ROUNDS
    unplanned: ClassVar = "its memory is not simulated. Only snugfit measure runs it"
    searched: ClassVar = False

    def is_searched(self) -> bool:
        """Return True. A plan that must keep this technique then fails with the reason why it cannot be
        simulated.
        """
        return True

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield the reasons against this technique: training, autocast, models changed by other techniques,
        and unsupported text generation.
        """
        if job.trains:
            yield "it has no backward pass. Add --phase evaluate, or leave it out."
        elif job.added_phase is not None:
            yield from self.objections_to_generation(job)
        if recipe[Slot.PRECISION].alone.autocast:
            yield f"{recipe[Slot.PRECISION]} casts in eager code alone. Try 'fp32' or 'bf16_pure'."
        for slot in ONLY_PLAIN:
            if not recipe[slot].plain:
                yield f"{recipe[slot]} was not tested with it. Leave one of them out."

    @abstractmethod
    def objections_to_generation(self, job: Job) -> Iterator[str]:
        """Yield the reasons why a job with text generation cannot use this technique."""


@dataclass(frozen=True, kw_only=True)
class ExportTechnique(EvaluationTechnique):
    """Exports the model to a file, and runs it in another library."""

    unplanned: ClassVar = "not predicted on a GPU"

    def install(self, setup: Setup) -> Setup:
        """Return the setup with the library that runs the exported model."""
        return setup.with_fields(**{RUNTIME.name: self.name})

    def objections_to_generation(self, job: Job) -> Iterator[str]:
        """Yield the reasons against text generation: beam search, other caches and encoder-decoder models."""
        settings = job.phase_settings
        if settings.get("beams", 1) != 1:
            yield "the exported model does not reorder its cache for beams. Leave --beams out."
        if settings.get("cache", "dynamic") != "dynamic":
            yield f"the exported model has a dynamic cache, not {settings['cache']}. Leave --cache out."
        if job.task != "causal-lm":
            yield f"only causal-lm models generate with it, and the task is {job.task}. Leave it out."
        if job.padding:
            yield "padded prompts were not tested with it. Leave --padding out."
