"""The order of recipes: whether what was foreseen to be faster was, and what choosing by it costs.

A plan chooses, so what counts is less whether its seconds are right than whether their order is. Two figures
say so, both of runs of one job. *Kendall's tau* (Biometrika 30, 1938; in form b, which allows for ties:
Biometrika 33, 1945) is the share of pairs in their right order less the share in the wrong one: 1 when every
pair is right, 0 for a coin. The *gap* is what the recipe that was foreseen to be the fastest loses to the one
that was seen to be.

Runs that did not end as they should, or whose seconds are known on one side only, have no place in an order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from snugfit.comparison.compared_runs import ComparedRun

APART = 0.05
"""Share of the faster's seconds from which two recipes are told apart by what was measured: steps vary by
some per cent from process to process."""


@dataclass(frozen=True, kw_only=True)
class RankAgreement:
    """Pairs of recipes of one job, or of several jobs added up."""

    right: int = 0
    """Whose foreseen order is what was seen."""

    wrong: int = 0
    """Whose foreseen order is the other."""

    tied_foreseen: int = 0
    """Foreseen to take the same, and seen to differ."""

    tied_seen: int = 0
    """Seen to take the same, and foreseen to differ."""

    def __add__(self, other: RankAgreement) -> RankAgreement:
        return RankAgreement(
            right=self.right + other.right,
            wrong=self.wrong + other.wrong,
            tied_foreseen=self.tied_foreseen + other.tied_foreseen,
            tied_seen=self.tied_seen + other.tied_seen,
        )

    @property
    def pairs(self) -> int:
        """How many were seen to differ."""
        return self.right + self.wrong + self.tied_foreseen

    @property
    def tau(self) -> float | None:
        """Kendall's tau-b, from -1 to 1; None when nothing can be told."""
        ordered = self.right + self.wrong
        comparable = (ordered + self.tied_foreseen) * (ordered + self.tied_seen)
        return (self.right - self.wrong) / math.sqrt(comparable) if comparable else None


def agreement_of_pairs(seconds: Iterable[tuple[float, float]], *, apart: float = 0.0) -> RankAgreement:
    """The order of (foreseen, seen) seconds; only pairs seen to be more than the share `apart` from each
    other count."""
    counts = dict.fromkeys(("right", "wrong", "tied_foreseen", "tied_seen"), 0)
    for (foreseen, seen), (other_foreseen, other_seen) in combinations(seconds, 2):
        if apart and abs(seen - other_seen) <= apart * min(seen, other_seen):
            continue
        before, after = foreseen - other_foreseen, seen - other_seen
        if before and after:
            counts["right" if (before > 0) == (after > 0) else "wrong"] += 1
        elif before or after:
            counts["tied_foreseen" if after else "tied_seen"] += 1
    return RankAgreement(**counts)


def order(runs: Iterable[ComparedRun], *, apart: float = 0.0) -> RankAgreement:
    """The order of the runs of one job."""
    return agreement_of_pairs([run.seconds for run in runs if run.seconds], apart=apart)


def gap(runs: Iterable[ComparedRun]) -> float | None:
    """The share by which the run that was foreseen to be the fastest (of equals the first) is slower than the
    fastest seen; None when it did not end as it should."""
    foreseen = [run for run in runs if run.predicted_step_seconds and run.fits is not False]
    if not foreseen:
        return None
    first = min(foreseen, key=lambda run: run.predicted_step_seconds or math.inf)
    seen = [run.seconds[1] for run in foreseen if run.seconds]
    return first.seconds[1] / min(seen) - 1 if first.seconds else None


def group_by_job(runs: Sequence[ComparedRun]) -> list[list[ComparedRun]]:
    """The runs of each job, in the order in which the jobs come."""
    found: dict[str, list[ComparedRun]] = {}
    for run in runs:
        found.setdefault(run.job_id, []).append(run)
    return list(found.values())


def pooled_agreement(runs: Sequence[ComparedRun], *, apart: float = 0.0) -> RankAgreement:
    """The orders within each job, added up: no pair is of two jobs."""
    return sum((order(job, apart=apart) for job in group_by_job(runs)), RankAgreement())
