"""Technique of gradient accumulation: the global batch is split into n equal micro-batches, and their
gradients are added for one update.

Activations fall to 1/n. The sums are those of the whole batch: each micro-batch's loss is weighted by its
share of the batch's labels. The job's batch never changes, so n must divide it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from snugfit.job.sample_mixing import mixing_of
from snugfit.techniques.counterpart import Counterpart, Setting
from snugfit.techniques.setting import between
from snugfit.techniques.technique import Fidelity, Technique, TechniqueBySlot

if TYPE_CHECKING:
    from snugfit.job.job import Job


@dataclass(frozen=True, kw_only=True)
class MicroBatches(Technique):
    """Runs the global batch in n equal pieces and adds up their gradients for one update."""

    fidelity: ClassVar = Fidelity.SAME
    source: ClassVar = (
        "gradient accumulation, as accelerate's and the HF Trainer's gradient_accumulation_steps"
    )
    elsewhere: ClassVar = (
        "gradient_accumulation",
        "gradient_accumulation_steps",
        "accumulation",
        "accumulate_grad_batches",
    )
    counterparts: ClassVar = (Counterpart(arguments={"gradient_accumulation_steps": Setting("n")}),)

    n: int = between(1, 1 << 20)
    """Number of micro-batches in a step; a divisor of the global batch."""

    @property
    def value(self) -> int:
        """Return the number of micro-batches into which the global batch is split."""
        return self.n

    def objections(self, job: Job, recipe: TechniqueBySlot) -> Iterator[str]:
        """Yield an objection to a number of micro-batches that does not divide the batch into equal,
        non-empty ones.
        """
        if job.batch_size % self.n:
            near = nearest_divisors(job.batch_size, self.n)
            tries = " or ".join(f"{self.name}({divisor})" for divisor in near)
            yield f"a batch of {job.batch_size} cannot be cut into {self.n} equal pieces. Try {tries}."

    @classmethod
    def planning_objection(cls, job: Job) -> str:
        """Return the reason why no plan may split this job's batch; empty if it may. Its samples may depend
        on each other, or random data may hide such a dependence.
        """
        # A loss that compares samples (contrastive, batch statistics) has another value for micro-batches.
        if reason := mixing_of(job).reason:
            return (
                f"its loss is not a mean over samples, so a batch in pieces would train differently: {reason}"
            )
        return job.unclear_cut and (
            f"it is not known whether a batch in pieces trains the same: {job.unclear_cut}"
        )

    @classmethod
    def uncertain(cls, job: Job) -> str:
        """Return a warning that micro-batches may change this job's gradients. Empty if the loss is a mean
        over independent samples.
        """
        unknown = mixing_of(job).unknown
        return unknown and f"it is not known whether its loss is a mean over samples: {unknown}"

    @classmethod
    def settings(cls, job: Job) -> Iterator[Self]:
        """Yield this technique with each number of micro-batches that divides the job's batch."""
        yield from (cls(n=n) for n in divisors_of(job.batch_size) if n > 1)


def divisors_of(whole: int) -> list[int]:
    """Return all divisors of `whole`, in order."""
    # Divisors come in pairs, so a search up to the square root finds all.
    pairs = ((i, whole // i) for i in range(1, math.isqrt(whole) + 1) if whole % i == 0)
    return sorted({divisor for pair in pairs for divisor in pair})


def nearest_divisors(whole: int, n: int) -> list[int]:
    """Return the largest divisor of `whole` below `n` and the smallest above, if there are any."""
    divisors = divisors_of(whole)
    below = [divisor for divisor in divisors if divisor < n]
    above = [divisor for divisor in divisors if divisor > n]
    return [*below[-1:], *above[:1]]
