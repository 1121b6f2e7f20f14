"""Fit the host's constants of `prediction/rates.json` to the seconds of hosts with a drained device.

    python lab/fit_host.py OUT.json PROFILED.json [PROFILED.json ...]

Every run of these files (`profile_kernels.py host` writes them) is rehearsed again. With the device drained
before each step, the host's seconds in a phase are those of its kernel launches. They are linear in the
constants of `HostLaunchCosts`: so many kernels of the forward pass, so many modules and views. The fitted
constants have the smallest sum of absolute errors, and none is negative. Each error is a share of its whole
step. Errors of loading are a share of loading, which is a hundredth of a step of text. Steps on a disturbed
core are left out.

Some constants keep their old values. A drained step does not show the cost of a wait beside its duration. The
runs contain no selective checkpointing, no products of an optimizer, no autograd Functions of libraries and
no compiled programs.

Further fits leave out one family each. They report the errors of predictions for a family outside the fit.
"""

from __future__ import annotations

import json
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from snugfit.errors import SnugfitError
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job
from snugfit.measurement.quiet_core import DISTURBED_RATIO
from snugfit.prediction.device import policy_for
from snugfit.prediction.profile import Software, installed_versions
from snugfit.prediction.rates import HostLaunchCosts, packaged_rates
from snugfit.prediction.seconds import launch_seconds, with_worker_batches
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.recipe import Recipe

GPU = "h200"
NAMES = tuple(field.name for field in fields(HostLaunchCosts))
KEPT = (
    "wait",
    "intercepted",
    "product",
    "function",
    "generated",
    "in_program",
    "program",
    "backward_program",
)
FREE = tuple(name for name in NAMES if name not in KEPT)
ROUNDS, MIN_ERROR = 60, 0.01
"""Rounds of reweighting, and the relative error below which an equation gains no more weight."""


@dataclass(frozen=True)
class Steps:
    """One profiled run as equations of the fit."""

    family: str
    name: str
    counts: dict[str, Any]
    """Number of times that each phase pays each constant of `FREE`: an array of (constants,)."""
    seconds: dict[str, float]
    """Seconds of the host by phase, with a drained device."""

    def rows(self) -> tuple[list[Any], list[float]]:
        """Return the sides of the equations: one of each phase, and one of the whole step."""
        phases = [phase for phase in self.seconds if phase in self.counts]
        whole = sum(self.seconds[phase] for phase in phases)
        left: list[Any] = []
        right: list[float] = []
        for phase in phases:
            unit = self.seconds[phase] if phase == "load" else whole
            left.append(self.counts[phase] / unit)
            right.append(self.seconds[phase] / unit)
        return [*left, sum(self.counts[phase] for phase in phases) / whole], [*right, 1.0]

    def error(self, host: Any) -> float:
        """Return the relative error of the whole step under these constants: predicted / measured - 1."""
        left, _ = self.rows()
        return float(left[-1] @ host) - 1


def equations_of(task: tuple[dict[str, Any], float]) -> Steps | str:
    """Return a run's equations from its rehearsal and its undisturbed drained steps, or the reason for
    none."""
    run, slowest = task
    job, recipe = Job.from_json(run["job"]), Recipe.parse(run["recipe"])
    drained = [spent for pace, spent in run["drained"] if pace <= slowest]
    if not drained:
        return f"{job.model.name}, {recipe}: its core was disturbed"
    try:
        trace = rehearse(job, recipe.setup(), policy_for(find_gpu(GPU), Software()))
    except SnugfitError as refusal:
        return f"{job.model.name}, {recipe}: {refusal}"
    kernels = with_worker_batches(recipe.setup().loader.workers, trace.kernels)
    units = [HostLaunchCosts(**{name: float(name == unit) for name in NAMES}) for unit in FREE]
    of_kind = {
        kernel: np.array([launch_seconds(kernel, unit) for unit in units])
        for kernel in dict.fromkeys(kernels)
    }
    counts: dict[str, Any] = {}
    for kernel in kernels:
        counts[kernel.phase] = counts.get(kernel.phase, 0) + of_kind[kernel]
    counts["update"] = counts["update"] + np.array([float(name == "step") for name in FREE])
    return Steps(
        family=job.model.name,
        name=f"{job.model.name}, {recipe}",
        counts=counts,
        seconds={phase: statistics.median(spent[phase] for spent in drained) for phase in drained[0]},
    )


def fit(runs: list[Steps]) -> Any:
    """Return the constants of `FREE` with the least absolute errors, an array of (constants,).

    The fit uses iteratively reweighted least squares. A constant that would be negative is 0.
    """
    equations = [run.rows() for run in runs]
    left = np.array([side for rows, _ in equations for side in rows])
    right = np.array([value for _, values in equations for value in values])
    positive = np.flatnonzero(left.any(axis=0))
    while True:
        weight = np.ones(len(right))
        for _ in range(ROUNDS):
            solution = np.linalg.lstsq(left[:, positive] * weight[:, None], right * weight, rcond=None)[0]
            weight = 1 / np.sqrt(np.maximum(np.abs(left[:, positive] @ solution - right), MIN_ERROR))
        if (solution >= 0).all():
            break
        positive = np.delete(positive, solution.argmin())
    host = np.zeros(len(FREE))
    host[positive] = solution
    return host


def quantiles(errors: Any) -> dict[str, float]:
    """Return the median and the 90th percentile of the absolute errors."""
    sizes = np.abs(errors)
    return {"median": float(np.median(sizes)), "p90": float(np.quantile(sizes, 0.9))}


def main() -> None:
    """Fit the constants, print them and write them."""
    out, files = Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]
    measured = [run for file in files for run in json.loads(file.read_text())["runs"]]
    slowest = DISTURBED_RATIO * min(pace for run in measured for pace, _ in run["drained"])
    runs: list[Steps] = []
    with ProcessPoolExecutor(2) as pool:
        for result in pool.map(equations_of, ((run, slowest) for run in measured)):
            if isinstance(result, str):
                print(result, file=sys.stderr)
            else:
                runs.append(result)
    host = fit(runs)
    families = sorted({run.family for run in runs})
    errors = {family: [run.error(host) for run in runs if run.family == family] for family in families}
    left_out: list[float] = []
    for family in families:
        without = fit([run for run in runs if run.family != family])
        left_out += [run.error(without) for run in runs if run.family == family]
    result = {
        "schema": 1,
        "what": "fitted-host",
        "versions": installed_versions(),
        "files": [file.name for file in files],
        "runs": len(runs),
        "host": replace(
            packaged_rates(find_gpu(GPU)).host, **dict(zip(FREE, map(float, host), strict=True))
        ).to_json(),
        "error": quantiles([error for of_family in errors.values() for error in of_family]),
        "error_left_out": quantiles(left_out),
        "bias": {family: statistics.median(of_family) for family, of_family in errors.items()},
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
