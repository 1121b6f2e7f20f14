"""Verify: a plan's best recipes, measured here one after the other, each in a process of its own.

What comes out are runs as `snugfit accuracy` draws them, of one job: foreseen beside seen, whether the order
held, and how far the plan's first choice is from the best that was seen. A run that died is a run too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snugfit.comparison.compared_runs import ComparedRun
from snugfit.comparison.ranking import RankAgreement, gap, rank_agreement
from snugfit.evaluation.accuracy import see
from snugfit.evaluation.learn import LearnedFactors
from snugfit.evaluation.predict_runs import PlannedRecipe
from snugfit.job.job import Job

SCHEMA = 1

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Verification:
    """A plan's best recipes, foreseen and seen."""

    gpu: str
    """Planned for."""

    device: str | None
    """Measured on; None when nothing could be."""

    runs: tuple[ComparedRun, ...]
    """In the plan's order, its first choice first."""

    versions: Mapping[str, str]
    """Of the packages that planned."""

    learned: LearnedFactors | None = None
    """What the calibration learned; None when it was kept out."""

    @property
    def order(self) -> RankAgreement:
        """Whether the order of seconds held."""
        return rank_agreement(self.runs)

    @property
    def gap(self) -> float | None:
        """The share by which the fastest foreseen is slower than the fastest seen."""
        return gap(self.runs)

    @property
    def outside(self) -> tuple[ComparedRun, ...]:
        """The runs that are outside the band of `snugfit accuracy`, or failed."""
        return tuple(run for run in self.runs if run.complaint)

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "schema": SCHEMA,
            "what": "verification",
            "gpu": self.gpu,
            "device": self.device,
            "versions": dict(self.versions),
            "tau": self.order.tau,
            "gap": self.gap,
            "learned": self.learned.to_json() if self.learned else None,
            "runs": [run.to_json() for run in self.runs],
        }


def verify(
    job: Job,
    gpu: str,
    recipes: Sequence[PlannedRecipe],
    *,
    versions: Mapping[str, str],
    tell: Tell = lambda line: None,
) -> Verification:
    """Measures these recipes of a plan for `gpu` here."""
    runs: list[ComparedRun] = []
    device, began = None, time.monotonic()
    for number, foreseen in enumerate(recipes):
        left = f", about {_left(began, number, len(recipes)):.0f} s left" if number else ""
        tell(f"measuring {number + 1} of {len(recipes)}{left}: {foreseen.recipe}")
        run, where = see(foreseen.run(job, number))
        runs.append(run)
        device = device or where
    return Verification(gpu=gpu, device=device, runs=tuple(runs), versions=versions)


def _left(began: float, done: int, total: int) -> float:
    return (time.monotonic() - began) / done * (total - done)
