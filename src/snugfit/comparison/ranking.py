"""Whether recipes rank by predicted seconds as by measured ones, and what a wrong choice costs.

A plan chooses, so the order of its seconds counts more than their size. Two figures describe it, both of runs
of one job. *Kendall's tau* (Biometrika 30, 1938; in form b, which allows for ties: Biometrika 33, 1945) is
the share of concordant pairs less the share of discordant ones: 1 when every pair is in the right order, 0
for a coin. The *gap* is by how much the recipe that was predicted to be the fastest is slower than the
fastest measured one. The pairs are counted here rather than by scipy, because close ones are left out
(`apart`) and counts of several jobs are added up.

Runs that died, or whose seconds are not both predicted and measured, have no rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from snugfit.comparison.compared_runs import ComparedRun

APART = 0.05
"""Share of the faster's seconds by which two recipes must differ to be called different: steps vary by some
per cent from process to process."""


@dataclass(frozen=True, kw_only=True)
class RankAgreement:
    """Counts of pairs of recipes of one job, or of several jobs added up."""

    concordant: int = 0
    """The predicted order is the measured one."""
    discordant: int = 0
    """The predicted order is the other one."""
    tied_predicted: int = 0
    """Predicted to take the same, and measured to differ."""
    tied_measured: int = 0
    """Measured to take the same, and predicted to differ."""

    def __add__(self, other: RankAgreement) -> RankAgreement:
        return RankAgreement(
            concordant=self.concordant + other.concordant,
            discordant=self.discordant + other.discordant,
            tied_predicted=self.tied_predicted + other.tied_predicted,
            tied_measured=self.tied_measured + other.tied_measured,
        )

    @property
    def pairs(self) -> int:
        """Number of pairs that were measured to differ."""
        return self.concordant + self.discordant + self.tied_predicted

    @property
    def tau(self) -> float | None:
        """Kendall's tau-b, from -1 to 1; None without a pair that differs in both."""
        untied = self.concordant + self.discordant
        comparable = (untied + self.tied_predicted) * (untied + self.tied_measured)
        return (self.concordant - self.discordant) / math.sqrt(comparable) if comparable else None


def agreement_of_pairs(seconds: Iterable[tuple[float, float]], *, apart: float = 0.0) -> RankAgreement:
    """Counts over (predicted, measured) seconds; only pairs measured to be more than the share `apart` from
    each other count."""
    counts: Counter[str] = Counter()
    for (predicted, measured), (other_predicted, other_measured) in combinations(seconds, 2):
        if apart and abs(measured - other_measured) <= apart * min(measured, other_measured):
            continue
        before, after = predicted - other_predicted, measured - other_measured
        if before and after:
            counts["concordant" if (before > 0) == (after > 0) else "discordant"] += 1
        elif before or after:
            counts["tied_predicted" if after else "tied_measured"] += 1
    return RankAgreement(**counts)


def rank_agreement(runs: Iterable[ComparedRun], *, apart: float = 0.0) -> RankAgreement:
    """The agreement over the runs of one job."""
    return agreement_of_pairs([run.seconds for run in runs if run.seconds], apart=apart)


def gap(runs: Iterable[ComparedRun]) -> float | None:
    """The share by which the run that was predicted to be the fastest (of equals the first) is slower than
    the fastest measured; None when it died."""
    candidates = [run for run in runs if run.predicted_step_seconds and run.fits is not False]
    if not candidates:
        return None
    choice = min(candidates, key=lambda run: run.predicted_step_seconds or math.inf)
    measured = [run.seconds[1] for run in candidates if run.seconds]
    return choice.seconds[1] / min(measured) - 1 if choice.seconds else None


def group_by_job(runs: Sequence[ComparedRun]) -> list[list[ComparedRun]]:
    """The runs of each job, in the order in which the jobs first occur."""
    groups: dict[str, list[ComparedRun]] = {}
    for run in runs:
        groups.setdefault(run.job_id, []).append(run)
    return list(groups.values())


def pooled_agreement(runs: Sequence[ComparedRun], *, apart: float = 0.0) -> RankAgreement:
    """The counts within each job, added up: no pair is of two jobs."""
    return sum((rank_agreement(job, apart=apart) for job in group_by_job(runs)), RankAgreement())
