"""Fit the host's constants of `prediction/rates.json` to profiled steps.

    python benchmarks/fit_host.py OUT.json PROFILED.json [PROFILED.json ...]

Every run of these files (`profile_kernels.py device` or `snugfit accuracy` writes them) is rehearsed again,
its device's seconds are taken from the rates as they are, and the constants of `HostRate` are sought that
make the mean of |log(predicted / measured)| of step times smallest, through the same queue as any prediction.
An error beyond a factor of 1.6 counts as that: a run that something else disturbed must not bend the rest.
Four fits that leave out a quarter each say how well a run is predicted that was not fitted.

What the making of a batch costs hardly shows in a step of text, so `copy`, `sample` and `byte` are fitted to
what drained hosts spent in loading.
"""

from __future__ import annotations

import itertools
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from snugfit.errors import SnugfitError
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job
from snugfit.prediction.device import policy_for
from snugfit.prediction.kernel_seconds import KernelClock
from snugfit.prediction.profile import Software, installed_versions
from snugfit.prediction.rates import HostRate, packaged_rates
from snugfit.prediction.seconds import ROUNDS, all_waits, asking, prepared_by
from snugfit.rehearsal.rehearse import rehearse
from snugfit.techniques.recipe import Recipe

GPU = "h200"
NAMES = tuple(field.name for field in fields(HostRate))
LOADING = ("copy", "prepared", "sample", "byte")
LARGEST_ERROR = 0.5
TRIES = 6_000
MANY_BYTES = 1_000_000
"""Of a step's batches: pictures and sound."""

LEAST_STEP = 1e-3
"""Of `step`: no more is believed than the smallest measured steps allow."""


@dataclass(frozen=True)
class Steps:
    """One profiled run, ready to be predicted with any host."""

    name: str
    measured: float
    device: Any
    """Seconds of each kernel."""
    counts: Any
    """How often each kernel asks for each of `NAMES`, (kernels, names)."""
    waits: tuple[int, ...]
    loading: float | None
    """Seconds that a drained host spent in loading."""

    def predicted(self, host: Any) -> float:
        """Seconds between the ends of two steps: `play`, a stretch between two waits at a time."""
        asked = self.counts @ host
        step, wait = host[NAMES.index("step")], host[NAMES.index("wait")]
        cuts = [0, *sorted(self.waits), len(self.device)]
        stretches = []
        for start, end in itertools.pairwise(cuts):
            asks, works = np.cumsum(asked[start:end]), np.cumsum(self.device[start:end])
            latest = (asks - np.concatenate([[0.0], works[:-1]])).max() if end > start else -np.inf
            stretches.append((asks[-1] if end > start else 0.0, works[-1] if end > start else 0.0, latest))
        now = free = last = length = 0.0
        for _ in range(ROUNDS):
            now += step
            for number, (asks, works, latest) in enumerate(stretches):
                now = max(now, free) + wait if number else now
                free, now = works + max(free, now + latest), now + asks
            length, last = max(now, free) - last, max(now, free)
        return float(length)


def prepared(run: dict[str, Any]) -> Steps | str:
    """This run rehearsed; why not, where it cannot be."""
    gpu = find_gpu(GPU)
    job, recipe = Job.from_json(run["job"]), Recipe.parse(run["recipe"])
    try:
        tape = rehearse(job, recipe.setup(), policy_for(gpu, Software()))
    except SnugfitError as refusal:
        return f"{job.model.name}, {recipe}: {refusal}"
    clock = KernelClock(packaged_rates(gpu))
    workers = recipe.setup().loader.workers
    kernels = prepared_by(workers, tape.kernels)
    units = [HostRate(**{name: float(name == unit) for name in NAMES}) for unit in NAMES]
    kinds = dict.fromkeys(kernels)
    of_kind = {kernel: [asking(kernel, unit) for unit in units] for kernel in kinds}
    loading = run.get("host_seconds_drained", {}).get("load")
    return Steps(
        name=f"{job.model.name}, {recipe}",
        measured=run["step_seconds"],
        device=np.array([clock.seconds(kernel) for kernel in kernels]),
        counts=np.array([of_kind[kernel] for kernel in kernels]),
        waits=all_waits(kernels, tape.waits),
        loading=loading,
    )


def errors(runs: list[Steps], host: Any) -> Any:
    """|log(predicted / measured)| of each run."""
    return np.array([abs(np.log(run.predicted(host) / run.measured)) for run in runs])


def fitted_loading(runs: list[Steps], host: Any) -> Any:
    """The host with what loading costs: each tensor and sample from small batches, each byte from large ones,
    as medians of what drained hosts spent there."""
    places = [NAMES.index(name) for name in LOADING]
    seen = [run for run in runs if run.loading and run.device.sum() < run.measured / 2]
    counts = np.array([run.counts[:, places].sum(axis=0) for run in seen])
    spent = np.array([run.loading for run in seen])
    large = counts[:, 3] > MANY_BYTES
    weight = np.ones(int((~large).sum()))
    small, took = counts[~large, :3], spent[~large]
    for _ in range(50):  # least absolute errors, as shares
        found = np.linalg.lstsq(small / took[:, None] * weight[:, None], weight, rcond=None)[0]
        weight = 1 / np.sqrt(np.maximum(np.abs(small @ found / took - 1), 0.02))
    byte = np.median((spent[large] - counts[large, :3] @ found) / counts[large, 3])
    host = host.copy()
    host[places] = [*found, max(0.0, float(byte))]
    return host


def fitted(runs: list[Steps], host: Any, tries: int, seed: int) -> Any:
    """The host that predicts these runs best, sought from this one by steps at random that are kept when they
    help."""
    random = np.random.default_rng(seed)
    free = np.array([name not in LOADING for name in NAMES])
    best = np.minimum(errors(runs, host), LARGEST_ERROR).mean()
    for _ in range(tries):
        moved = host * np.exp(random.normal(0, 0.2, len(host)) * (random.random(len(host)) < 0.3) * free)
        moved[NAMES.index("step")] = min(moved[NAMES.index("step")], LEAST_STEP)
        found = np.minimum(errors(runs, moved), LARGEST_ERROR).mean()
        if found < best:
            host, best = moved, found
    return host


def quantiles(found: Any) -> dict[str, float]:
    """Median and 90th percentile."""
    return {"median": float(np.median(found)), "p90": float(np.quantile(found, 0.9))}


def main() -> None:
    """Prints what was found, and writes it."""
    out, files = Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]
    documents = [json.loads(file.read_text()) for file in files]
    measured = [run for document in documents for run in document["runs"] if run["step_seconds"]]
    runs: list[Steps] = []
    with ProcessPoolExecutor(2) as pool:
        for found in pool.map(prepared, measured):
            if isinstance(found, str):
                print(found, file=sys.stderr)
            else:
                runs.append(found)
    known = packaged_rates(find_gpu(GPU)).host
    start = np.array([getattr(known, name) for name in NAMES])
    start = fitted_loading(runs, start)
    host = fitted(runs, start, TRIES, 0)
    order = np.random.default_rng(0).permutation(len(runs))
    left_out = np.zeros(len(runs))
    for part in range(4):
        tested = order[part::4]
        others = [run for number, run in enumerate(runs) if number not in set(tested.tolist())]
        found = fitted(others, start, TRIES // 3, part)
        left_out[tested] = errors([runs[number] for number in tested], found)
    result = {
        "schema": 1,
        "what": "fitted-host",
        "versions": installed_versions(),
        "files": [file.name for file in files],
        "runs": len(runs),
        "host": dict(zip(NAMES, map(float, host), strict=True)),
        "error": quantiles(errors(runs, host)),
        "error_left_out": quantiles(left_out),
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
