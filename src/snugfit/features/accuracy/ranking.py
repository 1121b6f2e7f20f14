"""Compare the order of recipes by predicted seconds with their order by measured seconds.

A plan chooses the fastest recipe, so the order of step times counts more than their size. Two numbers
describe the order of one job's runs.

- *Kendall's tau* is the share of concordant pairs minus the share of discordant ones. It is 1 when every pair
  is in order, 0 for a random order. Source: Biometrika 30, 1938; form b, which allows for ties: Biometrika
  33, 1945.
- The *gap* is the slowdown of the predicted fastest recipe against the fastest measured one.

The pairs are counted here instead of by scipy. This allows leaving out pairs with nearly equal seconds
(`min_difference`), and summing counts over jobs. Runs that died, or that lack predicted or measured seconds,
have no rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from snugfit.features.accuracy.compared_runs import ComparedRun

MIN_DIFFERENCE = 0.05
"""Smallest relative difference in step seconds at which two recipes count as different.

The seconds of a step vary by some per cent between processes.
"""


@dataclass(frozen=True, kw_only=True)
class RankAgreement:
    """Counts of pairs of runs in equal and opposite predicted and measured order. Kendall's tau is computed
    from them.
    """

    concordant: int = 0
    """Number of pairs of runs with equal predicted and measured order."""
    discordant: int = 0
    """Number of pairs of runs with opposite predicted and measured order."""
    tied_predicted: int = 0
    """Number of pairs of runs with equal predicted and different measured seconds."""
    tied_measured: int = 0
    """Number of pairs of runs with equal measured and different predicted seconds."""

    def __add__(self, other: RankAgreement) -> RankAgreement:
        return RankAgreement(
            concordant=self.concordant + other.concordant,
            discordant=self.discordant + other.discordant,
            tied_predicted=self.tied_predicted + other.tied_predicted,
            tied_measured=self.tied_measured + other.tied_measured,
        )

    @property
    def pairs(self) -> int:
        """Number of pairs of runs with different measured seconds."""
        return self.concordant + self.discordant + self.tied_predicted

    @property
    def tau(self) -> float | None:
        """Kendall's tau-b of predicted and measured order, from -1 to 1. None if no pair differs in both."""
        untied = self.concordant + self.discordant
        comparable = (untied + self.tied_predicted) * (untied + self.tied_measured)
        return (self.concordant - self.discordant) / math.sqrt(comparable) if comparable else None


def agreement_of_pairs(
    seconds: Iterable[tuple[float, float]], *, min_difference: float = 0.0
) -> RankAgreement:
    """Count pairs of (predicted, measured) seconds by their order.

    Pairs whose measured seconds differ by at most the share `min_difference` are left out.
    """
    counts: Counter[str] = Counter()
    for (predicted, measured), (other_predicted, other_measured) in combinations(seconds, 2):
        if min_difference and abs(measured - other_measured) <= min_difference * min(
            measured, other_measured
        ):
            continue
        before, after = predicted - other_predicted, measured - other_measured
        if before and after:
            counts["concordant" if (before > 0) == (after > 0) else "discordant"] += 1
        elif before or after:
            counts["tied_predicted" if after else "tied_measured"] += 1
    return RankAgreement(**counts)


def rank_agreement(runs: Iterable[ComparedRun], *, min_difference: float = 0.0) -> RankAgreement:
    """Count the pairs of one job's runs whose predicted and measured step times have the same or opposite
    order.
    """
    return agreement_of_pairs([run.seconds for run in runs if run.seconds], min_difference=min_difference)


def gap(runs: Iterable[ComparedRun]) -> float | None:
    """Return the slowdown of the predicted fastest run against the fastest measured one, as a fraction.

    The first of equal predictions is taken. None when that run died.
    """
    candidates = [run for run in runs if run.predicted_step_seconds and run.fits is not False]
    if not candidates:
        return None
    choice = min(candidates, key=lambda run: run.predicted_step_seconds or math.inf)
    measured = [run.seconds[1] for run in candidates if run.seconds]
    return choice.seconds[1] / min(measured) - 1 if choice.seconds else None


def group_by_job(runs: Sequence[ComparedRun]) -> list[list[ComparedRun]]:
    """Group runs by job, in the order in which the jobs first occur."""
    groups: dict[str, list[ComparedRun]] = {}
    for run in runs:
        groups.setdefault(run.job_id, []).append(run)
    return list(groups.values())


def pooled_agreement(runs: Sequence[ComparedRun], *, min_difference: float = 0.0) -> RankAgreement:
    """Sum the counts of pairs over jobs. Runs of different jobs form no pair."""
    return sum(
        (rank_agreement(job, min_difference=min_difference) for job in group_by_job(runs)), RankAgreement()
    )
