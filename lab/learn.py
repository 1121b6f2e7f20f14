"""Fit one factor of the host's rates and one of the device's to verified recipes.

    python lab/learn.py VERIFIED.json [--workers 2]

VERIFIED.json is the output of `snugfit plan ... --verify K --json` on this machine. The factors correct the
rates in this GPU's calibration file, which keeps the origin of each correction.

One factor is the slowness of the host relative to its rates, the other that of the device. Nothing finer is
fitted, because a handful of runs of one job cannot identify more. Unidentified factors stay as they were.

The fit minimises absolute deviations of log(predicted / measured), so it is robust. An outlier weighs no more
than its distance. A run that is twice too slow weighs as much as one twice too fast. The predictions are
those of the queue of host and device (`prediction/seconds.py`), simulated again and again. There is no second
formula. Two properties make that cheap:

- A queue whose host *and* device take `c` times as long takes `c` times as long. So the seconds of a run for
  any pair of factors follow from its seconds for each *ratio* of host to device. One rehearsal gives one
  curve for each run (`Curve`).
- For one ratio the best factor of the device is a weighted median over the runs. So only the ratio is
  searched. The search uses a grid, because the sum has several local minima.

A prior at 1 weighs as much as a tenth of a run (`PRIOR_WEIGHT`). It decides factors that the runs leave open.
If the device bounds every run, the host's factor stays at 1.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from snugfit.documents import encode_fields, read_document, write_document
from snugfit.features.accuracy.compared_runs import ComparedRun
from snugfit.job.gpu import Gpu, find_gpu
from snugfit.prediction.device import policy_for
from snugfit.prediction.profile import Software, installed_versions
from snugfit.prediction.rates import Rates, calibration_file, rates_for
from snugfit.prediction.seconds import step_seconds
from snugfit.prediction.worker_pool import map_in_processes
from snugfit.rehearsal.rehearse import rehearse

MIN_RUNS = 3
"""Fewest runs of a fit: one more than there are factors."""

MAX_SPREAD = 0.5
"""Largest spread of a run's steps for a meaningful mean. Steps that the host bounds vary by a fifth on a
shared machine. The mean of eight varies by less than half of that."""

MAX_FACTOR = 3.0
"""Largest plausible factor. A factor above it, or below 1 / it, has another cause."""

MIN_GAIN = 0.005
"""Least decrease of the mean |log| error, because each correction invalidates the cached plans."""

SEARCH_LIMIT = 12.0
"""Largest factor of the search. It is larger than `MAX_FACTOR`, so that such a factor is recognised."""

PRIOR_WEIGHT = 0.1
"""Weight of each factor's |log| beside the runs' |log| errors."""

CURVE_TOLERANCE = 0.002
"""Largest distance, in logarithms, between a curve and its chord in the middle of an interval."""

MIN_INTERVAL = 0.02
"""Shortest intervals of a curve, in logarithms of the ratio. They are not halved further."""

RATIOS = 4_000
"""Size of the grid of ratios, even in logarithms: one every quarter of a per cent."""

CORRECTED = "; corrected by "
"""Separator between the source of the rates and the origins of their corrections."""

ENTRIES = 20
"""Largest number of corrections with a stored origin. The rates hold all of them."""

Floats = NDArray[np.float64]


class Curve(NamedTuple):
    """Seconds of one run's step by the ratio of its host's factor to its device's; all in logarithms."""

    ratios: tuple[float, ...]
    """Ascending logarithms of the ratio."""
    seconds: tuple[float, ...]
    """Logarithms of the seconds, with the device's factor at 1."""

    def at(self, ratio: Floats | float) -> Floats:
        """Return logarithms of the seconds at these logarithms of the ratio, in their shape.

        Values between the points are linear. Values beyond the ends continue the last segment.
        """
        ratios, seconds = np.array(self.ratios), np.array(self.seconds)
        right = np.clip(np.searchsorted(ratios, ratio), 1, len(ratios) - 1)
        share = (ratio - ratios[right - 1]) / (ratios[right] - ratios[right - 1])
        log_seconds: Floats = seconds[right - 1] * (1 - share) + seconds[right] * share
        return log_seconds


@dataclass(frozen=True, kw_only=True)
class LearnedFactors:
    """The factors of this machine, fitted to a handful of verified runs."""

    host: float
    """Factor of the host's seconds relative to its rates."""
    device: float
    """Factor of the device's seconds relative to its rates."""
    before: tuple[float, ...]
    """Relative errors of the predicted seconds, one for each run."""
    after: tuple[float, ...]
    """The same with both factors applied."""
    why_not: str = ""
    """Reason to leave the factors unapplied, or an empty text."""

    @property
    def changes_rates(self) -> bool:
        """Return True if the factors are applied to the rates."""
        return not self.why_not

    def to_json(self) -> dict[str, Any]:
        """Return the factors and errors as a JSON object."""
        return encode_fields(self)


def learn(
    runs: Sequence[ComparedRun],
    gpu: Gpu,
    *,
    rates: Rates,
    workers: int = 1,
    tell: Callable[[str], None] = lambda line: None,
) -> LearnedFactors:
    """Return the factors that fit these measured runs, relative to `rates`.

    Raises `SnugfitError` if one of them cannot be rehearsed.
    """
    usable = [run for run in runs if _is_usable(run)]
    if len(usable) < MIN_RUNS:
        return nothing_learned(f"{len(usable)} of {len(runs)} runs can be used, but {MIN_RUNS} are needed")
    curves = []
    for curve in map_in_processes(partial(curve_of, gpu, rates), usable, workers=workers):
        curves.append(curve)
        tell(f"learning from run {len(curves)} of {len(usable)}")
    measured = [math.log(run.step_seconds or 0.0) for run in usable]
    host, device = fit_factors(curves, measured)
    before, after = _errors(curves, measured), _errors(curves, measured, host, device)
    why_not = _why_not(host, device, before, after)
    return LearnedFactors(
        host=math.exp(host), device=math.exp(device), before=before, after=after, why_not=why_not
    )


def nothing_learned(why: str) -> LearnedFactors:
    """Return factors of 1 with the reason."""
    return LearnedFactors(host=1.0, device=1.0, before=(), after=(), why_not=why.rstrip("."))


def _is_usable(run: ComparedRun) -> bool:
    """Return True if its seconds are known, steady and undisturbed by other processes."""
    undisturbed = run.contaminated is None and run.crowded is None
    return run.seconds is not None and undisturbed and (run.spread or 0.0) <= MAX_SPREAD


def _why_not(host: float, device: float, before: Sequence[float], after: Sequence[float]) -> str:
    """Return the reason to leave these factors (logarithms) unapplied, or an empty text."""
    too_large = [
        f"the {what} would have to be {math.exp(factor):.2f} times slower than its rates say"
        for what, factor in (("host", host), ("device", device))
        if abs(factor) > math.log(MAX_FACTOR)
    ]
    if too_large:
        return f"{' and '.join(too_large)}, and a factor above {MAX_FACTOR:g} is not believed"
    if mean_log_error(after) > mean_log_error(before) - MIN_GAIN:
        return "no factors improve the predictions by half a per cent, so the rates stay as they are"
    return ""


def mean_log_error(errors: Sequence[float]) -> float:
    """Return the mean of |log(predicted / measured)| of relative errors, which the fit minimises."""
    return sum(abs(math.log(1 + error)) for error in errors) / len(errors)


def _errors(
    curves: Sequence[Curve], measured: Sequence[float], host: float = 0.0, device: float = 0.0
) -> tuple[float, ...]:
    """Return relative errors of the predicted seconds under these factors. All arguments are logarithms."""
    pairs = zip(curves, measured, strict=True)
    return tuple(math.expm1(float(curve.at(host - device)) + device - seconds) for curve, seconds in pairs)


# ---- the curves ------------------------------------------------------------------------------------------


def curve_of(gpu: Gpu, rates: Rates, run: ComparedRun) -> Curve:
    """Return the seconds of this run by the ratio of its host's factor to its device's."""
    setup = run.recipe.setup()
    trace = rehearse(run.job, setup, policy_for(gpu, Software()))
    simulate = partial(step_seconds, trace, gpu, batch_size=run.job.batch_size, workers=setup.loader.workers)

    def seconds(ratio: float) -> float:
        return simulate(rates=replace(rates, host=rates.host.slower(ratio))).step_seconds

    return sample_curve(seconds)


def sample_curve(seconds: Callable[[float], float]) -> Curve:
    """Return the curve of a function of the ratio.

    Intervals are halved until their chords are close to it.
    """
    end = 2 * math.log(SEARCH_LIMIT)
    samples: dict[float, float] = {}

    def log_seconds(ratio: float) -> float:
        if ratio not in samples:
            samples[ratio] = math.log(seconds(math.exp(ratio)))
        return samples[ratio]

    intervals = [(-end + end * quarter / 4, -end + end * (quarter + 1) / 4) for quarter in range(8)]
    while intervals:
        left, right = intervals.pop()
        middle = (left + right) / 2
        distance = log_seconds(middle) - (log_seconds(left) + log_seconds(right)) / 2
        if abs(distance) > CURVE_TOLERANCE and right - left > MIN_INTERVAL:
            intervals += [(left, middle), (middle, right)]
    ratios = tuple(sorted(samples))
    return Curve(ratios, tuple(samples[ratio] for ratio in ratios))


# ---- the factors -----------------------------------------------------------------------------------------


class Factors(NamedTuple):
    """Logarithms of the factors of host and device."""

    host: float
    device: float


def fit_factors(curves: Sequence[Curve], measured: Sequence[float]) -> Factors:
    """Return the factors with the smallest sum of absolute errors.

    `measured` are logarithms of seconds, one for each curve. The arrays below have one column for each ratio
    of the grid. Their rows are the runs, and the prior of either factor.
    """
    limit = math.log(SEARCH_LIMIT)
    ratios = 2 * limit * (2 * np.arange(RATIOS + 1) / RATIOS - 1)
    asked = [seconds - curve.at(ratios) for curve, seconds in zip(curves, measured, strict=True)]
    values = np.stack([*asked, np.zeros_like(ratios), -ratios])
    weights = np.array([1.0] * len(curves) + [PRIOR_WEIGHT] * 2)[:, None] + np.zeros_like(values)
    order = np.lexsort((weights, values), axis=0)
    values, weights = np.take_along_axis(values, order, 0), np.take_along_axis(weights, order, 0)
    half = (len(curves) + 2 * PRIOR_WEIGHT) / 2
    median = np.argmax(np.cumsum(weights, axis=0) >= half, axis=0)
    device = np.take_along_axis(values, median[None], 0)[0]
    lowest, highest = np.maximum(-limit, -limit - ratios), np.minimum(limit, limit - ratios)
    device = np.minimum(np.maximum(device, lowest), highest)
    errors = (weights * np.abs(values - device)).sum(axis=0)
    best = np.lexsort((ratios, device, errors))[0]
    return Factors(host=float(ratios[best] + device[best]), device=float(device[best]))


def slower(rates: Rates, *, host: float, device: float) -> Rates:
    """Return the rates of a machine whose host and device take so many times as long for everything."""
    products = {
        name: replace(rate, flops=rate.flops / device, start=rate.start * device, wave=rate.wave * device)
        for name, rate in rates.products.items()
    }
    attention, patterns = (
        {name: (rate / device, start * device) for name, (rate, start) in table.items()}
        for table in (rates.attention, rates.patterns)
    )
    return replace(
        rates,
        products=products,
        attention=attention,
        patterns=patterns,
        bandwidth=rates.bandwidth / device,
        link=rates.link / device,
        start=rates.start * device,
        host=rates.host.slower(host),
    )


# ---- the calibration -------------------------------------------------------------------------------------


def correct_calibration(learned: LearnedFactors, runs: Sequence[ComparedRun], gpu: Gpu, rates: Rates) -> Path:
    """Multiply this GPU's rates by both factors, and note their origin beside them."""
    file = calibration_file(gpu)
    try:
        document = read_document(file)
    except FileNotFoundError:
        document = {"schema": 1, "what": "calibration", "readings": [], "versions": installed_versions()}
    entry = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "job": runs[0].job.model.name,
        "job_id": runs[0].job_id,
        "recipes": [str(run.recipe) for run in runs],
        **{name: value for name, value in learned.to_json().items() if name != "why_not"},
        "versions": installed_versions(),
    }
    document["learned"] = [*document.get("learned", []), entry][-ENTRIES:]
    source, _, _ = rates.source.partition(CORRECTED)
    changed = slower(rates, host=learned.host, device=learned.device)
    source = f"{source}{CORRECTED}{len(learned.before)} verified runs"
    document["rates"] = replace(changed, source=source).to_json()
    file.parent.mkdir(parents=True, exist_ok=True)
    write_document(file, document)
    return file


def main() -> None:
    """Fit the factors to one verified plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("verified", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    document = read_document(arguments.verified)
    runs = [ComparedRun.from_json(run) for run in document["runs"]]
    gpu = find_gpu(document["gpu"])
    rates = rates_for(gpu)
    learned = learn(runs, gpu, rates=rates, workers=arguments.workers, tell=print)
    if not learned.changes_rates:
        print(f"Nothing was learned: {learned.why_not}.")
        return
    file = correct_calibration(learned, runs, gpu, rates)
    before, after = (100 * fmean(map(abs, errors)) for errors in (learned.before, learned.after))
    print(
        f"The host takes {learned.host:.2f} times and the device {learned.device:.2f} times as long as the "
        f"rates say. Mean error of the seconds: {before:.1f} % before, {after:.1f} % after. Written: {file}"
    )


if __name__ == "__main__":
    main()
