"""Verification of a plan: measurement of its best recipes, one after the other, each in its own process.

The result contains runs of one job, like those of `snugfit accuracy`. It also has the agreement of predicted
and measured order, and the slowdown of the plan's first choice. A run that died stays in the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from snugfit.documents import JsonDocument
from snugfit.features.accuracy.compared_runs import ComparedRun
from snugfit.features.accuracy.peers import NO_PEERS, Peers
from snugfit.features.accuracy.predict_runs import PlannedRecipe
from snugfit.features.accuracy.ranking import RankAgreement, gap, rank_agreement
from snugfit.features.accuracy.score import measure_run
from snugfit.job.job import Job

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Verification(JsonDocument):
    """Predictions and measurements of a plan's best recipes, with those of the plain Trainer."""

    what: ClassVar = "verification"

    gpu: str
    """Name of the GPU that the plan was made for."""
    device: str | None
    """Name of the measured GPU; None when no run could start."""
    runs: tuple[ComparedRun, ...]
    """Predicted and measured runs of the plan's recipes, the plan's first choice first."""
    versions: Mapping[str, str]
    """Versions of the packages with which the plan was made."""
    peers: Peers = NO_PEERS
    """Measurements of the plain Trainer on the same job, for comparison."""

    @property
    def order(self) -> RankAgreement:
        """Agreement between the order of recipes by predicted step time and that by measured step time."""
        return rank_agreement(self.runs)

    @property
    def gap(self) -> float | None:
        """Slowdown of the predicted fastest run against the measured fastest one, as a fraction."""
        return gap(self.runs)

    @property
    def faster_than_peer(self) -> float | None:
        """Speedup of the plan's first choice over the plain Trainer; None when either was not measured."""
        first, peer = self.runs[0] if self.runs else None, self.peers.best
        if first is None or peer is None or first.outcome != "ok" or not first.step_seconds:
            return None
        return (peer.run.step_seconds or 0.0) / first.step_seconds

    @property
    def outside(self) -> tuple[ComparedRun, ...]:
        """The runs whose errors exceed those that `snugfit accuracy` allows, or that failed."""
        return tuple(run for run in self.runs if run.complaint)

    def derived_keys(self) -> dict[str, Any]:
        """Return the agreement of predicted and measured order, and the slowdowns against the fastest run and
        the Trainer.
        """
        return {"tau": self.order.tau, "gap": self.gap, "faster_than_peer": self.faster_than_peer}


def verify(
    job: Job,
    gpu: str,
    recipes: Sequence[PlannedRecipe],
    *,
    versions: Mapping[str, str],
    tell: Tell = lambda line: None,
) -> Verification:
    """Measure these recipes of a plan for `gpu` on this machine. `tell` receives progress messages."""
    runs: list[ComparedRun] = []
    device, began = None, time.monotonic()
    for number, planned in enumerate(recipes):
        remaining = (time.monotonic() - began) / number * (len(recipes) - number) if number else None
        left = f", about {remaining:.0f} s left" if remaining is not None else ""
        tell(f"measuring {number + 1} of {len(recipes)}{left}: {planned.recipe}")
        run, run_device = measure_run(planned.run(job, number + 1))
        runs.append(run)
        device = device or run_device
    return Verification(gpu=gpu, device=device, runs=tuple(runs), versions=versions)
