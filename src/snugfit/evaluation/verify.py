"""Verifies a plan: measures its best recipes here one after the other, each in a process of its own.

The result holds runs of one job, like those of `snugfit accuracy`: predicted and measured, whether they rank
alike, and how far the plan's first choice is from the fastest measured one. A run that died is a run too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snugfit.comparison.compared_runs import ComparedRun
from snugfit.comparison.ranking import RankAgreement, gap, rank_agreement
from snugfit.documents import encode_fields
from snugfit.evaluation.accuracy import measure_run
from snugfit.evaluation.peers import NO_PEERS, Peers
from snugfit.evaluation.predict_runs import PlannedRecipe
from snugfit.job.job import Job

SCHEMA = 1

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Verification:
    """A plan's best recipes, predicted and measured."""

    gpu: str
    """The GPU of the plan."""
    device: str | None
    """The device that was measured; None when every run was refused."""
    runs: tuple[ComparedRun, ...]
    """In the plan's order, its first choice first."""
    versions: Mapping[str, str]
    """Of the packages that planned."""
    peers: Peers = NO_PEERS
    """What a user of the plain Trainer would run, measured on the same job."""

    @property
    def order(self) -> RankAgreement:
        """How the predicted seconds rank beside the measured ones."""
        return rank_agreement(self.runs)

    @property
    def gap(self) -> float | None:
        """The share by which the predicted fastest is slower than the measured fastest."""
        return gap(self.runs)

    @property
    def faster_than_peer(self) -> float | None:
        """How many times as fast as the best peer the first choice is; None where either was not measured."""
        first, peer = self.runs[0] if self.runs else None, self.peers.best
        if first is None or peer is None or first.outcome != "ok" or not first.step_seconds:
            return None
        return (peer.run.step_seconds or 0.0) / first.step_seconds

    @property
    def outside(self) -> tuple[ComparedRun, ...]:
        """The runs that are outside the band of `snugfit accuracy`, or failed."""
        return tuple(run for run in self.runs if run.complaint)

    def to_json(self) -> dict[str, Any]:
        """The document of `snugfit plan --verify --json`."""
        return {
            "schema": SCHEMA,
            "what": "verification",
            **encode_fields(self, tau=self.order.tau, gap=self.gap, faster_than_peer=self.faster_than_peer),
        }


def verify(
    job: Job,
    gpu: str,
    recipes: Sequence[PlannedRecipe],
    *,
    versions: Mapping[str, str],
    tell: Tell = lambda line: None,
) -> Verification:
    """Measures these recipes of a plan for `gpu` here; `tell` is called with what is being done."""
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
