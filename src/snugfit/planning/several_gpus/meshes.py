"""Search for the fastest recipe on one number of GPUs, including groups that work on the same samples.

Ways that share the batch alone come first. In meshes, groups of GPUs share matrices or sequences, or form
stages. Meshes are tried if they may gain a distinguishable amount:

- Nothing else fits, or so many GPUs cannot share the batch evenly.
- They may take less than `GAIN` of the seconds of sharing the batch alone. That step recomputes layers, or
  exchanges between GPUs take much of it. The arithmetic alone, shared by all GPUs, must take less.

Two such axes are combined if nothing with one of them fits.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping

from snugfit.job.job import Job
from snugfit.planning.keep import Kept
from snugfit.planning.several_gpus.asking import Asking
from snugfit.planning.several_gpus.candidates import ways
from snugfit.planning.several_gpus.evidence import Evidence
from snugfit.planning.several_gpus.fastest import FastestOnGpus, Outcome, Screened
from snugfit.planning.several_gpus.sharings import MOST_AXES
from snugfit.techniques.recipe import Recipe

GAIN = 0.75
"""Share of the seconds of sharing the batch alone, below which a mesh is chosen in its place (chosen).

Five such steps on two H100s were not used for any fit. One took 41 % longer than predicted, the rest 3 %
less to 14 % longer.
"""


class FastestMesh:
    """Consecutive searches on several numbers of GPUs, for one job."""

    def __init__(
        self, job: Job, base: Recipe, fixed: Kept, evidence: Evidence, refused: MutableMapping[str, str]
    ) -> None:
        self._job, self._base, self._fixed = job, base, fixed
        self._evidence, self._refused = evidence, refused

    def run(self, gpus: int, limit: float = math.inf, mesh_limit: float = math.inf) -> Asking[Outcome]:
        """Return the recipes that fit so many GPUs in less than `limit` seconds a step, a mesh in less than
        `mesh_limit`.

        Without a limit, return the nearest miss if nothing fits.
        """
        outcome = yield from self._among(gpus, 0, limit)
        known = outcome.fitting
        if known:
            mesh_limit = min(mesh_limit, GAIN * known[0].judged.step_seconds)
        mesh_limit = min(limit, mesh_limit)
        fits, miss = outcome.does_any_fit, outcome.miss
        alone = known[0].judged.step_seconds if known else limit if fits else None
        for axes in range(1, MOST_AXES + 1 if gpus > 1 else 1):
            meshes = yield from self._among(gpus, axes, mesh_limit)
            fits = fits or meshes.does_any_fit
            miss = _smaller(miss, meshes.miss)
            known = [*meshes.fitting, *known]
            if fits:
                break
        return Outcome(known, None if known else miss, fits, alone)

    def _among(self, gpus: int, axes: int, limit: float) -> Asking[Outcome]:
        every = ways(self._job, self._base, gpus, self._fixed, axes)
        search = FastestOnGpus(
            self._job, gpus, every, self._fixed, self._evidence, self._refused,
            leanest_first=not axes or limit == math.inf,
        )  # fmt: skip
        return (yield from search.run(limit))


def _smaller(one: Screened | None, other: Screened | None) -> Screened | None:
    """Return the smaller of two misses."""
    known = [miss for miss in (one, other) if miss is not None]
    return min(known, key=lambda miss: miss.judged.needed_bytes, default=None)
