"""Calibration: the rates that this GPU and this host achieve, measured on a handful of small jobs.

Each probe is an ordinary experiment (`measure`: a process of its own, steady steps) that one resource bounds,
beside its prediction; the difference of the two corrects that resource's rate. So what is calibrated is what
is predicted, through the same steps, without a separate benchmark. Probes that another resource turned out to
bound correct nothing.

- The host by a small model in three recipes: the device has next to nothing to do.
- The bandwidth by an update of many parameters, with next to no tokens.
- Matrix products by a wide model, in each precision that the GPU has; bf16 stands for fp16, which the
  same units compute, and for fp8 too.

The order of correction matters: a later probe is predicted with the rates that earlier ones corrected. The
order of measuring is another: the update of many parameters comes first, whose seconds are the device's
alone, because meanwhile the probes are rehearsed here, and a rehearsal takes a core.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from snugfit.errors import SnugfitError
from snugfit.job.gpu import Gpu
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.measurement.stopwatch import WARMUP, steady_steps
from snugfit.prediction.device import policy_for
from snugfit.prediction.kernel_seconds import KernelClock
from snugfit.prediction.profile import Software, installed_versions
from snugfit.prediction.rates import Rates, packaged_rates
from snugfit.prediction.seconds import step_seconds
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import MATRIX_PRODUCTS
from snugfit.results.measurement import HIGH_DISTURBANCE
from snugfit.results.step_seconds import StepSeconds
from snugfit.techniques.recipe import Recipe

if TYPE_CHECKING:
    from snugfit.rehearsal.trace.trace import Trace

DEADLINE_SECONDS = 120.0
CORRECTED_TOGETHER = {"bf16": ("bf16", "fp16", "fp8")}
"""Precisions that one probe corrects together."""

PROBE_ERRORS = {"host": 0.97, "bandwidth": 1.04, "fp32": 0.955, "tf32": 1.03, "bf16": 1.05}
"""Measured / predicted seconds of each probe on the H200 whose rates were fitted to all its kernels, and to
all families on its host (2026-11-21 and 22). That error is the probe's own and says nothing about another
machine: relative to their prediction, a Llama's steps take the host three per cent less than those of the
thirteen families do."""

UPDATE_STEPS = 80
"""Steps of the probe that is measured before anything is predicted: about a second on an H200."""

MIN_FACTOR = 0.1
"""A correction below it, or above 1 / it, is not believed: something else went wrong."""

ATTEMPTS = 3
"""How often a probe of the host is measured at most, until others leave its core alone. A choice."""


class ProbeSeconds(NamedTuple):
    """What a probe's run took."""

    step_seconds: float
    """Mean of the measured steps."""
    disturbed: float | None = None
    """Share of the checks in which others disturbed the core; None where that was not looked at."""


MeasureSeconds = Callable[[Job, Recipe, int], ProbeSeconds]
"""Seconds of so many measured steps; raises `SnugfitError` when the run died."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A small experiment that corrects one rate."""

    corrects: str
    """`host`, `bandwidth`, or a precision of matrix products."""
    job: Job
    recipe: str


@dataclass(frozen=True, kw_only=True)
class ProbeReading:
    """A probe, predicted with the rates known before it, and measured."""

    probe: Probe
    predicted_seconds: float
    measured_seconds: float | None
    """None when the run died."""
    factor: float | None
    """By how many times the corrected rate was too fast; None when something else bounded the probe, or it
    died."""
    why: str = ""
    """Why nothing was corrected."""
    disturbed: float | None = None
    """Share of the checks in which other processes disturbed the core that launches kernels."""

    def to_json(self) -> dict[str, Any]:
        """The reading as a JSON object of the calibration file."""
        return {
            "corrects": self.probe.corrects,
            "recipe": self.probe.recipe,
            "predicted_seconds": self.predicted_seconds,
            "measured_seconds": self.measured_seconds,
            "factor": self.factor,
            "why": self.why,
            "disturbed": self.disturbed,
        }


def probes(precisions: tuple[str, ...]) -> tuple[Probe, ...]:
    """The probes for a GPU with these precisions, in the order of correction."""
    small = _llama(layers=16, width=512, vocabulary=8_000, batch=4, length=64)
    table = _llama(layers=1, width=2048, vocabulary=100_000, batch=1, length=8)
    wide = _llama(layers=4, width=2048, vocabulary=1_000, batch=16, length=512)
    recipes = {"fp32": "sgd", "tf32": "tf32 + sgd"}
    recipes |= {"bf16": "bf16_pure + sgd"} if "bf16" in precisions else {"fp16": "fp16 + sgd"}
    return (
        Probe(corrects="host", job=small, recipe="sgd"),
        Probe(corrects="host", job=small, recipe="bf16 + every_layer"),
        Probe(corrects="host", job=small, recipe="eager + bf16"),
        Probe(corrects="bandwidth", job=table, recipe="adamw"),
        *(Probe(corrects=name, job=wide, recipe=recipes[name]) for name in recipes if name in precisions),
    )


def _llama(*, layers: int, width: int, vocabulary: int, batch: int, length: int) -> Job:
    config = {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": width * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
    }
    model = Model.from_config(config, name=f"probe-{layers}x{width}")
    return Job(model=model, task=Task.CAUSAL_LM, batch_size=batch, sequence_length=length)


def calibrate(
    gpu: Gpu,
    *,
    measure_seconds: MeasureSeconds | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> tuple[Rates, tuple[ProbeReading, ...]]:
    """The rates of this GPU and its host, and the readings they come from.

    Starts from the package's rates (measured ones, or scaled by data sheet). Raises `GpuError` when the
    table knows too little of the GPU.
    """
    rates = packaged_rates(gpu)
    runner = _ProbeRunner(gpu, rates, measure_seconds or _measure_seconds, tell)
    chosen = probes(tuple(name for name in rates.products if gpu.peak_dense.get(name)))
    readings: list[ProbeReading] = []
    for run in runner.run_all(chosen):
        readings.append(_read(run, gpu, rates))
        rates = _correct(rates, readings)
    if any(reading.factor for reading in readings):
        source = f"calibrated with torch {installed_versions()['torch']}"
        rates = replace(rates, source=source, measured=True)
    return rates, tuple(readings)


class _ProbeRun(NamedTuple):
    """One probe, rehearsed and measured."""

    probe: Probe
    trace: Trace
    measured: ProbeSeconds | str
    """What it took, or why nothing is known."""


class _ProbeRunner:
    """Rehearses and measures the probes, both at once where neither disturbs the other."""

    def __init__(
        self, gpu: Gpu, rates: Rates, measure_seconds: MeasureSeconds, tell: Callable[[str], None]
    ) -> None:
        self._gpu, self._rates, self._measure, self._tell = gpu, rates, measure_seconds, tell

    def run_all(self, chosen: tuple[Probe, ...]) -> list[_ProbeRun]:
        """Each probe in the order of correction, rehearsed and measured."""
        update = next(probe for probe in chosen if probe.corrects == "bandwidth")
        with ThreadPoolExecutor(max_workers=1) as executor:
            rehearsal = executor.submit(lambda: [self._trace(probe) for probe in chosen])
            self._tell(f"probe 1 of {len(chosen)}: {update.corrects}")
            update_seconds = self._measure_or_reason(update, UPDATE_STEPS)
            traces = rehearsal.result()
        runs: list[_ProbeRun] = []
        started = 1
        for probe, trace in zip(chosen, traces, strict=True):
            if probe is update:
                runs.append(_ProbeRun(probe, trace, update_seconds))
                continue
            started += 1
            self._tell(f"probe {started} of {len(chosen)}: {probe.corrects}")
            predicted = step_seconds(trace, self._gpu, batch_size=probe.job.batch_size, rates=self._rates)
            steps = steady_steps(predicted.step_seconds, host=probe.corrects == "host")
            runs.append(_ProbeRun(probe, trace, self._measure_or_reason(probe, steps)))
        return runs

    def _trace(self, probe: Probe) -> Trace:
        return rehearse(probe.job, Recipe.parse(probe.recipe).setup(), policy_for(self._gpu, Software()))

    def _measure_or_reason(self, probe: Probe, steps: int) -> ProbeSeconds | str:
        """The least disturbed run of a few, where the host is what is measured; else the first."""
        runs: list[ProbeSeconds] = []
        for _ in range(ATTEMPTS if probe.corrects == "host" else 1):
            try:
                runs.append(self._measure(probe.job, Recipe.parse(probe.recipe), steps))
            except SnugfitError as died:
                return str(died)
            if (runs[-1].disturbed or 0.0) <= HIGH_DISTURBANCE:
                break
        return min(runs, key=lambda run: run.disturbed or 0.0)


def _read(run: _ProbeRun, gpu: Gpu, rates: Rates) -> ProbeReading:
    """The factor that this probe asks for, beside rates that earlier probes corrected."""
    probe, trace, measured = run
    predicted = step_seconds(trace, gpu, batch_size=probe.job.batch_size, rates=rates)
    reading = ProbeReading(
        probe=probe, predicted_seconds=predicted.step_seconds, measured_seconds=None, factor=None
    )
    if isinstance(measured, str):
        return replace(reading, why=measured)
    bound_by_host = predicted.host_seconds > predicted.device_seconds
    why = ""
    if bound_by_host != (probe.corrects == "host"):
        why = "the device bounds it" if probe.corrects == "host" else "the host bounds it"
    error = PROBE_ERRORS.get(probe.corrects, 1.0)
    share = _seconds_of_rate(probe.corrects, trace, rates, predicted) * error
    # the rest of the step is taken as right
    factor = 1 + (measured.step_seconds - predicted.step_seconds * error) / share
    if not why and not MIN_FACTOR < factor < 1 / MIN_FACTOR:
        factor, why = 1.0, f"it would have to change by {factor:.2f}, for no known reason"
    return replace(
        reading,
        measured_seconds=measured.step_seconds,
        factor=None if why else factor,
        why=why,
        disturbed=measured.disturbed,
    )


def _seconds_of_rate(corrects: str, trace: Trace, rates: Rates, predicted: StepSeconds) -> float:
    """Seconds of the predicted step that depend on the rate that a probe corrects."""
    if corrects == "host":
        return predicted.step_seconds
    clock = KernelClock(rates)
    seconds = {True: 0.0, False: 0.0}
    for kernel in trace.kernels:
        seconds[kernel.operator in MATRIX_PRODUCTS] += clock.seconds(kernel)
    return seconds[corrects != "bandwidth"]


def _measure_seconds(job: Job, recipe: Recipe, steps: int) -> ProbeSeconds:
    from snugfit.measurement.measure import measure

    run = measure(job, recipe, warmup=WARMUP, steps=steps, deadline_seconds=DEADLINE_SECONDS, ledger=None)
    if run.timing is None:
        raise SnugfitError(f"The probe's run ended with {run.outcome}: {run.message}")
    return ProbeSeconds(run.timing.step_seconds, run.disturbed)


def _correct(rates: Rates, readings: list[ProbeReading]) -> Rates:
    """The rates corrected by the last reading; several of the host by their geometric mean."""
    last = readings[-1]
    if last.factor is None:
        return rates
    corrects, factor = last.probe.corrects, last.factor
    if corrects == "host":
        earlier = [
            reading for reading in readings[:-1] if reading.probe.corrects == "host" and reading.factor
        ]
        factor = math.exp(math.log(factor) / (len(earlier) + 1))
        return replace(rates, host=rates.host.slower(factor))
    if corrects == "bandwidth":
        patterns = {name: (rate / factor, start) for name, (rate, start) in rates.patterns.items()}
        return replace(rates, bandwidth=rates.bandwidth / factor, patterns=patterns)
    products = {
        name: replace(rate, flops=rate.flops / factor)
        if name in CORRECTED_TOGETHER.get(corrects, (corrects,))
        else rate
        for name, rate in rates.products.items()
    }
    return replace(rates, products=products)
