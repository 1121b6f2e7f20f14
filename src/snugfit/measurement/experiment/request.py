"""The parameters of one experiment, and their JSON form for each measured process.

An experiment on several GPUs has one process (rank) for each. Every rank trains on its share of the global
batch, with the same seed and the same samples. All ranks have equal weights, and the only other difference
between them is the GPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snugfit.job.job import Job
from snugfit.measurement.contamination import GpuBaseline
from snugfit.measurement.target import Target
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.techniques.several_gpus import job_of_rank, on_gpus


@dataclass(frozen=True, kw_only=True)
class MeasurementRequest:
    """The job, recipe, length and options of one measurement."""

    job: Job
    recipe: Recipe
    loop: str
    warmup: int
    """Number of steps before the timed ones. Their memory peaks count."""
    steps: int
    """Number of timed steps."""
    deadline_seconds: float
    history: Path | None
    """File in which the first rank records the allocator's history; None records none."""
    trainer_arguments: Mapping[str, Any] = field(default_factory=dict)
    """`TrainingArguments` in addition to those that the recipe sets."""
    gpus: int = 1
    """Number of GPUs that train together."""

    @property
    def setup(self) -> Setup:
        """The training settings (`Setup`) of each measured process. Raises `UsageError` where the recipe does
        not support this number of GPUs.
        """
        return on_gpus(self.recipe.setup(), self.gpus)

    @property
    def rank_job(self) -> Job:
        """The job of each process, with its part of the global batch. Raises `UsageError` for a batch that
        cannot be divided evenly.
        """
        return job_of_rank(self.job, self.setup)

    def document(
        self, target: Target, baseline: GpuBaseline | None, *, rank: int = 0, store: Path | None = None
    ) -> dict[str, object]:
        """Return the parameters of the experiment as a JSON object for one measured process. `store` is the
        file by which ranks find each other.
        """
        return {
            "parent": os.getpid(),
            # All processes of a machine share the monotonic clock.
            "launched": time.monotonic(),
            "job": self.rank_job.to_json(),
            "setup": self.setup.to_json(),
            "loop": self.loop,
            "device": target.torch_device,
            "uuid": target.card.uuid if target.card else None,
            "baseline_bytes": baseline.used_bytes if baseline else None,
            "warmup": self.warmup,
            "steps": self.steps,
            "history": self.history is not None and rank == 0,
            "trainer_arguments": dict(self.trainer_arguments),
            "rank": rank,
            "ranks": self.gpus,
            "store": str(store) if store else None,
        }
