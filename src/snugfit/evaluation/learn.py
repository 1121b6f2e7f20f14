"""Learn: two factors that lay the predicted seconds of verified recipes on the measured ones.

How many times slower than its rates say is the host, and how many times the device? Nothing finer is asked:
a handful of runs of one job cannot tell more apart, and what they cannot tell is left as it was.

The factors minimise the sum of |log(predicted / measured)|, so a run that is far off weighs no more than its
distance, and a run that is twice too slow as much as one twice too fast. The predictions are those of the
queue of host and device (`prediction/seconds.py`), played again and again, never a formula of ours. Two
things make that cheap:

- A queue whose host *and* device take `c` times as long takes `c` times as long. So the seconds of a run for
  any pair of factors follow from its seconds for each *ratio* of host to device: one curve a run, rehearsed
  once (`Curve`).
- For one ratio the best factor of the device is a median of what the runs ask for. So only the ratio is
  searched, and it is searched whole, for the sum has several valleys.

A pull towards 1, as strong as a tenth of a run (`PULL`), decides what the runs leave open: where the device
bounds every run, nothing is learned about the host.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.prediction.device import policy_for
from snugfit.prediction.profile import Software
from snugfit.prediction.rates import Rates, rates_for
from snugfit.prediction.seconds import step_seconds
from snugfit.prediction.worker_pool import map_in_processes
from snugfit.rehearsal.rehearse import rehearse

if TYPE_CHECKING:
    from snugfit.comparison.compared_runs import ComparedRun
    from snugfit.job.gpu import Gpu

FEWEST = 3
"""Runs from which anything is learned: one more than there are factors."""

WILDEST = 0.5
"""Spread of a run's steps beyond which their mean says little. Steps that the host bounds vary by a fifth on
a shared machine, and the mean of eight of them by less than half of that."""

LARGEST_FACTOR = 3.0
"""A factor beyond it, either way, is not believed: something else went wrong."""

WORTH = 0.005
"""What the mean |log| error must lose at least: each correction makes the plans that are remembered anew."""

SEARCHED = 12.0
"""How far factors are looked for, so that one beyond belief is seen for what it is."""

PULL = 0.1
"""Weight of each factor's |log| beside the runs' |log| errors."""

CLOSE = 0.002
"""How far, in logarithms, a curve's chord may be from its middle before the middle is taken in."""

NARROW = 0.02
"""Logarithm of the ratio between two points of a curve below which it is not divided further."""

RATIOS = 4_000
"""Ratios that are tried, evenly in logarithms: one every quarter of a per cent."""


class Curve(NamedTuple):
    """Seconds of one run's step by the ratio of its host's factor to its device's."""

    ratios: tuple[float, ...]
    """In logarithms, rising."""
    seconds: tuple[float, ...]
    """In logarithms, with the device as its rates say."""

    def at(self, ratio: float) -> float:
        """By the straight line between the two nearest points."""
        place = min(max(1, bisect_left(self.ratios, ratio)), len(self.ratios) - 1)
        left, right = self.ratios[place - 1], self.ratios[place]
        share = (ratio - left) / (right - left)
        return self.seconds[place - 1] * (1 - share) + self.seconds[place] * share


@dataclass(frozen=True, kw_only=True)
class LearnedFactors:
    """What a handful of verified runs say about this machine."""

    host: float
    """How many times slower than its rates the host is."""

    device: float
    """How many times slower than its rates the device is."""

    before: tuple[float, ...]
    """Errors of the seconds as they were foreseen, as shares of what was measured."""

    after: tuple[float, ...]
    """The same with both factors taken in."""

    why_not: str = ""
    """Why nothing is taken in; empty when the factors are."""

    file: str | None = None
    """Where they were written."""

    @property
    def taken(self) -> bool:
        """Whether the factors change the rates."""
        return not self.why_not

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "host": self.host,
            "device": self.device,
            "before": list(self.before),
            "after": list(self.after),
            "why_not": self.why_not,
            "file": self.file,
        }


def learn(
    runs: Sequence[ComparedRun],
    gpu: Gpu,
    *,
    rates: Rates | None = None,
    workers: int = 1,
    tell: Callable[[str], None] = lambda line: None,
) -> LearnedFactors:
    """What these measured runs say about the host and the device, against `rates` (or those known today).

    Raises `SnugfitError` when one of them cannot be rehearsed.
    """
    rates = rates or rates_for(gpu)
    good = [run for run in runs if _trusted(run)]
    if len(good) < FEWEST:
        return nothing(f"{len(good)} of {len(runs)} runs can be learned from, and it takes {FEWEST}")
    curves = []
    for curve in map_in_processes(partial(curve_of, gpu, rates), good, workers=workers):
        curves.append(curve)
        tell(f"learning from run {len(curves)} of {len(good)}")
    measured = [math.log(run.step_seconds or 0.0) for run in good]
    host, device = factors(curves, measured)
    before, after = _errors(curves, measured), _errors(curves, measured, host, device)
    why_not = _doubt(host, device, before, after)
    return LearnedFactors(
        host=math.exp(host), device=math.exp(device), before=before, after=after, why_not=why_not
    )


def nothing(why: str) -> LearnedFactors:
    """Nothing was learned, and why."""
    return LearnedFactors(host=1.0, device=1.0, before=(), after=(), why_not=why.rstrip("."))


def _trusted(run: ComparedRun) -> bool:
    """Whether its seconds are the machine's own, and no wild ones."""
    alone = run.contaminated is None and run.crowded is None
    return run.seconds is not None and alone and (run.spread or 0.0) <= WILDEST


def _doubt(host: float, device: float, before: Sequence[float], after: Sequence[float]) -> str:
    """Why these factors are not to be taken in; empty when they are."""
    far = [
        f"the {what} would have to be {math.exp(factor):.2f} times slower than its rates say"
        for what, factor in (("host", host), ("device", device))
        if abs(factor) > math.log(LARGEST_FACTOR)
    ]
    if far:
        return f"{' and '.join(far)}, and a factor beyond {LARGEST_FACTOR:g} is not believed"
    if mean_size(after) > mean_size(before) - WORTH:
        return "no factors make the predictions better by half a per cent: the rates stand"
    return ""


def mean_size(errors: Sequence[float]) -> float:
    """The mean of |log(predicted / measured)|, which is what is made small."""
    return sum(abs(math.log(1 + error)) for error in errors) / len(errors)


def _errors(
    curves: Sequence[Curve], measured: Sequence[float], host: float = 0.0, device: float = 0.0
) -> tuple[float, ...]:
    pairs = zip(curves, measured, strict=True)
    return tuple(math.expm1(curve.at(host - device) + device - seen) for curve, seen in pairs)


# ---- the curves ------------------------------------------------------------------------------------------


def curve_of(gpu: Gpu, rates: Rates, run: ComparedRun) -> Curve:
    """How the seconds of this run follow the ratio of its host to its device."""
    setup = run.recipe.setup()
    trace = rehearse(run.job, setup, policy_for(gpu, Software()))
    known = partial(step_seconds, trace, gpu, batch_size=run.job.batch_size, rates=rates)

    def seconds(ratio: float) -> float:
        return known(host=ratio, workers=setup.loader.workers).step_seconds

    return sampled(seconds)


def sampled(seconds: Callable[[float], float]) -> Curve:
    """The curve of a function of the ratio, divided until its chords are close to it."""
    end = 2 * math.log(SEARCHED)
    known: dict[float, float] = {}

    def height(ratio: float) -> float:
        if ratio not in known:
            known[ratio] = math.log(seconds(math.exp(ratio)))
        return known[ratio]

    pieces = [(-end + end * place / 4, -end + end * (place + 1) / 4) for place in range(8)]
    while pieces:
        left, right = pieces.pop()
        middle = (left + right) / 2
        off = height(middle) - (height(left) + height(right)) / 2
        if abs(off) > CLOSE and right - left > NARROW:
            pieces += [(left, middle), (middle, right)]
    ratios = tuple(sorted(known))
    return Curve(ratios, tuple(known[ratio] for ratio in ratios))


# ---- the factors -----------------------------------------------------------------------------------------


def factors(curves: Sequence[Curve], measured: Sequence[float]) -> tuple[float, float]:
    """The host's and the device's factor that fit best, all in logarithms."""
    end = 2 * math.log(SEARCHED)
    ratios = [end * (2 * place / RATIOS - 1) for place in range(RATIOS + 1)]
    _, device, ratio = min((*_best_device(curves, measured, ratio), ratio) for ratio in ratios)
    return ratio + device, device


def _best_device(curves: Sequence[Curve], measured: Sequence[float], ratio: float) -> tuple[float, float]:
    """The least sum of errors for this ratio, and the device's factor that gives it: the median of what each
    run asks for, and of the pulls of both factors."""
    asked = [seen - curve.at(ratio) for curve, seen in zip(curves, measured, strict=True)]
    weighed = sorted([*((each, 1.0) for each in asked), (0.0, PULL), (-ratio, PULL)])
    half, passed = (len(asked) + 2 * PULL) / 2, 0.0
    device = 0.0
    for value, weight in weighed:
        passed += weight
        if passed >= half:
            device = value
            break
    bound = math.log(SEARCHED)
    device = min(max(device, -bound, -bound - ratio), bound, bound - ratio)
    return sum(weight * abs(value - device) for value, weight in weighed), device


def slower(rates: Rates, *, host: float, device: float) -> Rates:
    """The rates of a machine whose host and device take so many times as long for everything."""
    products = {
        name: replace(rate, flops=rate.flops / device, start=rate.start * device, wave=rate.wave * device)
        for name, rate in rates.products.items()
    }
    attention, patterns = (
        {name: (pace / device, start * device) for name, (pace, start) in table.items()}
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
