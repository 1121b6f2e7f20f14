"""Calibrate the hardware rates of this GPU and its host (CPU) with a handful of small training jobs, the
probes.

Each probe is an ordinary measurement (`measure`) in its own process, whose time one resource determines. The
ratio of its measured to its predicted step time corrects the rate of that resource. No separate benchmark is
needed. If another resource proves slower, the probe corrects nothing.

- Host: a small model in three recipes, with next to no work for the device.
- Memory bandwidth: an optimizer update of many parameters, with next to no tokens.
- Matrix products: a wide model in each precision of the GPU. bf16 also calibrates fp16, which runs on the
  same units, and fp8.
- Several GPUs: the host while all of them work, sharded weights, and collectives.

A process of its own first measures the GPU's power and the prices of the host (`machine_probe.py`). Each
probe is then predicted at the clock that NVML reads while it runs. Without readings, it is the clock of the
power model. So the corrected rates are those of the highest clock.

The order of correction matters: each probe is predicted with the rates that earlier probes corrected. The
order of measurement differs. The update of many parameters is measured first, since its time depends on the
device alone. Meanwhile a CPU core simulates the other probes.

One GPU is probed for the host, the bandwidth and matrix products. Several GPUs of a host are probed for the
host while all of them work. Concurrent processes took up to 1.5 times as long to launch kernels as one alone.
This was measured on shared hosts of two and four H200s (2026-11-26).

The shortest host probe is omitted on several GPUs, because DDP's fixed work per step dominates it. On two
hosts of two H100s it took 1.3 and 1.6 times its prediction. The other two took 1.05 to 1.09 times theirs
(results/h100-2026-11-26). Three more probes calibrate FSDP2's hooks, all-reduces of gradients, and
all-gathers of weights with reduce-scatters of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from snugfit.documents import JsonDocument
from snugfit.errors import SnugfitError
from snugfit.features.calibration.host_probe import PACKAGED_PRICES, host_at
from snugfit.features.calibration.machine_probe import measure_machine
from snugfit.features.calibration.power_fit import fit_power
from snugfit.job.gpu import Gpu, find_gpu
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.measurement.stopwatch import WARMUP, steady_steps
from snugfit.prediction.device import policy_for
from snugfit.prediction.exchanges import exchanges
from snugfit.prediction.power import PowerRates
from snugfit.prediction.profile import Software, installed_versions
from snugfit.prediction.rates import REFERENCE, Rates, packaged_rates
from snugfit.prediction.seconds import launch_seconds, queue_of, step_seconds
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import (
    ALL_GATHER,
    ALL_REDUCE,
    COLLECTIVES,
    MATRIX_PRODUCTS,
    SHARD_HOOKS,
    SHARDED_OPERANDS,
)
from snugfit.results.measurement import HIGH_DISTURBANCE
from snugfit.results.step_seconds import StepSeconds
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.techniques.several_gpus import job_of_rank, on_gpus
from snugfit.techniques.wish import processes_of
from snugfit.versions import versions

if TYPE_CHECKING:
    from snugfit.rehearsal.trace.trace import Trace

DEADLINE_SECONDS = 120.0
CORRECTED_TOGETHER = {"bf16": ("bf16", "fp16", "fp8")}
"""Precisions whose rates are corrected by one probe (small measured job), by the precision that this probe
uses."""

UPDATE_STEPS = 80
"""Number of steps of the first probe (small measured job): about one second on an H200."""

MIN_FACTOR = 0.1
"""Smallest accepted correction factor of a rate; the largest is 1 / MIN_FACTOR. Any other factor has a cause
besides the rate."""

ATTEMPTS = 3
"""Largest number of runs of a probe of the host's speed (chosen). They end after a run on an undisturbed
core."""

MIN_CLOCK_READINGS = 5
"""Smallest number of NVML readings of the clock whose mean replaces the power model's clock (chosen)."""


class ProbeSeconds(NamedTuple):
    """Measured seconds of a probe (a small training job)."""

    step_seconds: float
    """Mean measured seconds of a step."""
    disturbed: float | None = None
    """Share of the checks in which other processes slowed down the core. None without checks."""
    exchange_seconds: float | None = None
    """Seconds of NCCL kernels in one step; None on one GPU."""
    mhz: float | None = None
    """Mean clock of the multiprocessors during the timed steps; None without enough readings."""


@dataclass(frozen=True, kw_only=True)
class SteadyClock(PowerRates):
    """Power of a GPU whose clock was read while a probe ran."""

    share: float
    """Measured clock as a share of the highest one, at most 1."""

    def clock(self, seconds: Any, work: Sequence[Any]) -> Any:
        """Return the measured clock for any step."""
        return self.share


MeasureSeconds = Callable[[Job, Recipe, int], ProbeSeconds]
"""The type of a function that measures a job under a recipe for a number of steps. A recipe for several GPUs
runs on all GPUs of the calibration. Raises `SnugfitError` if the run fails."""


@dataclass(frozen=True, kw_only=True)
class ProbeReading:
    """A probe (a small training job) with its measured step time, and the time predicted with the rates
    before it.
    """

    probe: Probe
    predicted_seconds: float
    """Predicted seconds of a step."""
    measured_seconds: float | None
    """Measured seconds of a step; None when the run failed."""
    factor: float | None
    """Old rate divided by the corrected one, above 1 for an overestimated rate; None without a correction."""
    why: str = ""
    """Reason why the probe corrected no rate; empty if it did."""
    disturbed: float | None = None
    """Share of the checks in which other processes slowed down the core that launches kernels."""

    added_keys: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "corrects": (str, "The rate that the probe corrects."),
        "recipe": (str, "Recipe of the probe."),
    }
    """JSON keys that `to_json` adds to the fields, with types and descriptions
    (`features/schema/json_schema.py`)."""
    left_out_keys: ClassVar[tuple[str, ...]] = ("probe",)
    """Fields that `to_json` omits."""

    def to_json(self) -> dict[str, Any]:
        """Return this probe's measured and predicted seconds as a JSON object of the calibration file."""
        return {
            "corrects": self.probe.corrects,
            "recipe": self.probe.recipe,
            "predicted_seconds": self.predicted_seconds,
            "measured_seconds": self.measured_seconds,
            "factor": self.factor,
            "why": self.why,
            "disturbed": self.disturbed,
        }


@dataclass(frozen=True, kw_only=True)
class Calibration(JsonDocument):
    """The measured hardware rates of this GPU and its host, such as bytes per second."""

    what: ClassVar = "calibration"

    gpus: int
    """Number of GPUs that were calibrated together."""
    rates: Rates
    """Speeds of the GPU and its host after the corrections."""
    readings: tuple[ProbeReading, ...]
    """Results of the probes (small measured jobs) from which the rates were corrected."""
    versions: Mapping[str, str]
    """Versions of the packages with which the probes were measured."""
    machine: Mapping[str, Any] = field(default_factory=dict)
    """Readings of power and host: seconds of the host by sort of repeated work, and clock, watts and
    temperature of kernels."""
    unmeasured: str = ""
    """Reason why power or host prices were not measured; empty if they were."""


def calibrate(
    gpu: Gpu,
    *,
    gpus: int = 1,
    measure_seconds: MeasureSeconds | None = None,
    machine: Callable[[], Mapping[str, Any]] = measure_machine,
    tell: Callable[[str], None] = lambda line: None,
) -> Calibration:
    """Measure the hardware rates of this GPU and its host while `gpus` GPUs work. Return them with each
    probe's seconds.

    The correction starts from the package's rates, measured or scaled from the data sheet. `machine` returns
    the result of `machine_probe.py`. Raises `GpuError` when the GPU table lacks the necessary values.
    """
    rates = replace(packaged_rates(gpu), gpus=gpus)
    tell("power and host")
    probed = machine()
    rates, unmeasured = _with_power(rates, probed)
    prices = probed.get("host", {}).get("prices", {})
    has_prices = gpus == 1 and any(prices.get(name, 0.0) > 0 for name in PACKAGED_PRICES)
    if has_prices:
        known = packaged_rates(find_gpu(REFERENCE)).host
        rates = replace(rates, host=host_at(known, prices, PACKAGED_PRICES), calibrated=True)
    runner = _ProbeRunner(gpu, rates, measure_seconds or _measure_on(gpus), tell)
    chosen = probes(tuple(name for name in rates.products if gpu.peak_dense.get(name)), gpus)
    # Steps of whole models show the host only where its prices are not known.
    chosen = tuple(probe for probe in chosen if probe.corrects != HOST or not has_prices)
    readings: list[ProbeReading] = []
    for run in runner.run_all(chosen):
        readings.append(_read(run, gpu, rates))
        rates = _correct(rates, readings)
    if any(reading.factor for reading in readings):
        source = f"calibrated with torch {installed_versions()['torch']}"
        rates = replace(rates, source=source, measured=True, calibrated=True)
    return Calibration(
        gpus=gpus,
        rates=rates,
        readings=tuple(readings),
        versions=versions(),
        machine=probed,
        unmeasured=unmeasured,
    )


def _with_power(rates: Rates, probed: Mapping[str, Any]) -> tuple[Rates, str]:
    """Return the rates with the measured power, and the reason if it was not measured."""
    known = rates.power or packaged_rates(find_gpu(REFERENCE)).power
    if known is None or "power" not in probed:
        return rates, str(probed.get("why", ""))
    try:
        return replace(rates, power=fit_power(probed["power"]["rows"], known)), ""
    except ValueError as missing:
        return rates, str(missing)


class _ProbeRun(NamedTuple):
    """One probe (a small training job) with its simulated trace and its measurement."""

    probe: Probe
    trace: Trace
    measured: ProbeSeconds | str
    """The measured seconds, or the reason why there are none."""


class _ProbeRunner:
    """Simulates and measures probes (small training jobs), both at once where one does not slow down the
    other.
    """

    def __init__(
        self, gpu: Gpu, rates: Rates, measure_seconds: MeasureSeconds, tell: Callable[[str], None]
    ) -> None:
        self._gpu, self._rates, self._measure, self._tell = gpu, rates, measure_seconds, tell

    def run_all(self, chosen: tuple[Probe, ...]) -> list[_ProbeRun]:
        """Simulate and measure each probe; return the runs in the order of correction."""
        update = next(probe for probe in chosen if probe.corrects == BANDWIDTH)
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
            steps = steady_steps(predicted.step_seconds, host=probe.is_of_host)
            runs.append(_ProbeRun(probe, trace, self._measure_or_reason(probe, steps)))
        return runs

    def _trace(self, probe: Probe) -> Trace:
        setup = _setup_of(probe)
        return rehearse(job_of_rank(probe.job, setup), setup, policy_for(self._gpu, Software()))

    def _measure_or_reason(self, probe: Probe, steps: int) -> ProbeSeconds | str:
        """Measure a probe and return its seconds, or the reason why it died. A host probe runs a few times;
        the least disturbed run counts.
        """
        runs: list[ProbeSeconds] = []
        for _ in range(ATTEMPTS if probe.is_of_host else 1):
            try:
                runs.append(self._measure(probe.job, Recipe.parse(probe.recipe), steps))
            except SnugfitError as died:
                return str(died)
            if (runs[-1].disturbed or 0.0) <= HIGH_DISTURBANCE:
                break
        return min(runs, key=lambda run: run.disturbed or 0.0)


def _read(run: _ProbeRun, gpu: Gpu, rates: Rates) -> ProbeReading:
    """Return the measured and predicted seconds of a probe with the factor that corrects a hardware rate.
    `rates` are those corrected so far.
    """
    probe, trace, measured = run
    rates = _at_measured_clock(rates, measured)
    predicted = step_seconds(trace, gpu, batch_size=probe.job.batch_size, rates=rates)
    reading = ProbeReading(
        probe=probe, predicted_seconds=predicted.step_seconds, measured_seconds=None, factor=None
    )
    if isinstance(measured, str):
        return replace(reading, why=measured)
    if probe.corrects in EXCHANGES:
        return _read_exchange(reading, predicted, measured)
    bound_by_host = predicted.host_seconds > predicted.device_seconds
    reason = ""
    if bound_by_host != probe.is_of_host:
        reason = "the device bounds it" if probe.is_of_host else "the host bounds it"
    error = PROBE_ERRORS.get(probe.corrects, 1.0)
    share = _seconds_of_rate(probe.corrects, trace, rates, predicted) * error
    if not share:
        reason = "no kernel of its step depends on this rate"
        return replace(
            reading, measured_seconds=measured.step_seconds, why=reason, disturbed=measured.disturbed
        )
    # The difference is attributed to this rate alone, as if all other seconds were right.
    factor = 1 + (measured.step_seconds - predicted.step_seconds * error) / share
    reason = reason or _why_not(factor)
    return replace(
        reading,
        measured_seconds=measured.step_seconds,
        factor=None if reason else factor,
        why=reason,
        disturbed=measured.disturbed,
    )


def _at_measured_clock(rates: Rates, measured: ProbeSeconds | str) -> Rates:
    """Return rates with the clock that was read while a probe ran; the same rates without a reading."""
    if rates.power is None or isinstance(measured, str) or measured.mhz is None:
        return rates
    share = min(1.0, measured.mhz / rates.power.highest_mhz)
    return replace(rates, power=SteadyClock(**asdict(rates.power), share=share))


def _read_exchange(reading: ProbeReading, predicted: StepSeconds, measured: ProbeSeconds) -> ProbeReading:
    """Return the reading with the correction factor of a collective. NCCL's kernels are timed alone, so no
    other error enters.
    """
    seconds = measured.exchange_seconds
    if not seconds or not predicted.communication_seconds:
        return replace(reading, why="its exchanges could not be timed")
    factor = seconds / predicted.communication_seconds
    reason = _why_not(factor)
    return replace(
        reading,
        predicted_seconds=predicted.communication_seconds,
        measured_seconds=seconds,
        factor=None if reason else factor,
        why=reason,
    )


def _why_not(factor: float) -> str:
    """Return the reason for rejecting the correction factor of a probe (a small training job), such as an
    implausible size; empty if it is plausible.
    """
    plausible = MIN_FACTOR < factor < 1 / MIN_FACTOR
    return "" if plausible else f"it would have to change by {factor:.2f}, for no known reason"


def _setup_of(probe: Probe) -> Setup:
    return on_gpus(Recipe.parse(probe.recipe).setup(), probe.gpus)


def _seconds_of_rate(corrects: str, trace: Trace, rates: Rates, predicted: StepSeconds) -> float:
    """Return the seconds of the predicted step that depend on the hardware rate that a probe (a small
    training job) corrects.
    """
    if corrects == HOST:
        # The host limits the speed of such a probe, so the whole step depends on the host's rate.
        return predicted.step_seconds
    if corrects == SHARDING:
        of_shards = (SHARD_HOOKS, SHARDED_OPERANDS)
        return sum(
            launch_seconds(kernel, rates.host) for kernel in trace.kernels if kernel.operator in of_shards
        )
    queue = queue_of(trace, rates)
    seconds = {True: 0.0, False: 0.0}
    for kernel, on_device in zip(queue.kernels, queue.device, strict=True):
        seconds[kernel.operator in MATRIX_PRODUCTS] += on_device
    return seconds[corrects != BANDWIDTH]


def _measure_on(gpus: int) -> MeasureSeconds:
    """Return a function that measures a probe on one GPU, or on `gpus` for a recipe for several."""
    from snugfit.measurement.measure import measure

    def seconds(job: Job, recipe: Recipe, steps: int) -> ProbeSeconds:
        run = measure(
            job,
            recipe,
            gpus=gpus if processes_of(recipe.setup()) else 1,
            warmup=WARMUP,
            steps=steps,
            deadline_seconds=DEADLINE_SECONDS,
            # Probes are not stored with the user's own measurements.
            ledger=None,
        )
        if run.timing is None:
            raise SnugfitError(
                f"The probe's run ended with {run.outcome}: {run.message} Run snugfit calibrate again."
            )
        clock = run.clock
        mhz = clock.mean_mhz if clock and clock.readings >= MIN_CLOCK_READINGS else None
        return ProbeSeconds(run.timing.step_seconds, run.disturbed, run.fabric_seconds, mhz)

    return seconds


def _correct(rates: Rates, readings: list[ProbeReading]) -> Rates:
    """Return the hardware rates corrected by the last probe. Host rates use the geometric mean of all host
    probes.
    """
    last = readings[-1]
    if last.factor is None:
        return rates
    corrects, factor = last.probe.corrects, last.factor
    if corrects in EXCHANGES:
        return replace(rates, bus={**rates.bus, **_shares(corrects, factor, rates)})
    if corrects == SHARDING:
        hook, operand = rates.host.shard_hook * factor, rates.host.sharded_operand * factor
        return replace(rates, host=replace(rates.host, shard_hook=hook, sharded_operand=operand))
    if corrects == HOST:
        earlier = [reading for reading in readings[:-1] if reading.probe.corrects == HOST and reading.factor]
        # This factor multiplies the earlier corrections. Its root makes the result the geometric mean of all
        # factors.
        factor = math.exp(math.log(factor) / (len(earlier) + 1))
        return replace(rates, host=rates.host.slower(factor))
    if corrects == BANDWIDTH:
        patterns = {name: (rate / factor, start) for name, (rate, start) in rates.patterns.items()}
        return replace(rates, bandwidth=rates.bandwidth / factor, patterns=patterns)
    products = {
        name: replace(rate, flops=rate.flops / factor)
        if name in CORRECTED_TOGETHER.get(corrects, (corrects,))
        else rate
        for name, rate in rates.products.items()
    }
    return replace(rates, products=products)


def _shares(corrects: str, factor: float, rates: Rates) -> dict[str, float]:
    """Return, for each NCCL kernel, the achieved fraction of the link's data rate. The fraction of the
    measured collective is divided by its slowdown `factor`.
    """
    connected = exchanges().link(find_gpu(rates.gpu), rates)
    kinds = (ALL_REDUCE,) if corrects == ALL_REDUCE else sorted(COLLECTIVES - {ALL_REDUCE})
    return {kind: connected.share(kind, rates.gpus) / factor for kind in kinds}


# ---- probes -----------------------------------------------------------------------------------------------


HOST, BANDWIDTH, SHARDING = "host", "bandwidth", "sharding"
"""Names of rates that a probe may correct, besides precisions of matrix products and collectives.

`host` are all seconds of the host, `bandwidth` is that of GPU memory. `sharding` are the host's seconds for
sharded weights.
"""

EXCHANGES = (ALL_REDUCE, ALL_GATHER)
"""The two kinds of NCCL collectives with calibrated rates: all-reduce, and all others."""

PROBE_ERRORS = {"host": 0.97, "bandwidth": 1.04, "fp32": 0.955, "tf32": 1.03, "bf16": 1.05}
"""Measured divided by predicted seconds of each probe, on the H200 and the host that gave the package's
rates.

The rates were fitted to all kernels of that H200 and to all families on its host (2026-11-21 and 22). The
remaining error is the probe's own and does not transfer to another machine. A Llama's steps take the host
three per cent less, relative to their prediction, than the thirteen families' steps.
"""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A small training job whose measured time corrects one hardware rate, such as the memory bandwidth."""

    corrects: str
    """Name of the corrected rate: `host`, `bandwidth`, `sharding`, a precision of matrix products, or a NCCL
    collective."""
    job: Job
    recipe: str
    gpus: int = 1
    """Number of GPUs that train the job; its batch contains the samples of all of them."""

    @property
    def is_of_host(self) -> bool:
        """True when the probe corrects a rate of the host (the CPU)."""
        return self.corrects in (HOST, SHARDING)


def probes(precisions: tuple[str, ...], gpus: int = 1) -> tuple[Probe, ...]:
    """Return the probes (small training jobs) for `gpus` GPUs and these precisions, in the order of
    correction.
    """
    # `small` has many short kernels, `table` consists almost only of parameters, and `wide` has large matrix
    # products.
    small = _llama(layers=16, width=512, vocabulary=8_000, batch=4, length=64)
    table = _llama(layers=1, width=2048, vocabulary=100_000, batch=1, length=8)
    wide = _llama(layers=4, width=2048, vocabulary=1_000, batch=16, length=512)
    recipes = {"fp32": "sgd", "tf32": "tf32 + sgd"}
    recipes |= {"bf16": "bf16_pure + sgd"} if "bf16" in precisions else {"fp16": "fp16 + sgd"}
    of_host = ("sgd", "bf16 + every_layer", "eager + bf16")
    alone = (
        Probe(corrects=BANDWIDTH, job=table, recipe="adamw"),
        *(Probe(corrects=name, job=wide, recipe=recipes[name]) for name in recipes if name in precisions),
    )
    if gpus == 1:
        return (*(Probe(corrects=HOST, job=small, recipe=recipe) for recipe in of_host), *alone)
    of_all = replace(small, batch_size=small.batch_size * gpus)
    table_of_all = replace(table, batch_size=table.batch_size * gpus)
    return (
        *(Probe(corrects=HOST, job=of_all, recipe=f"{recipe} + ddp", gpus=gpus) for recipe in of_host[1:]),
        *alone,
        Probe(corrects=SHARDING, job=of_all, recipe="adamw + fsdp", gpus=gpus),
        Probe(corrects=ALL_REDUCE, job=table_of_all, recipe="sgd + ddp", gpus=gpus),
        Probe(corrects=ALL_GATHER, job=table_of_all, recipe="sgd + fsdp", gpus=gpus),
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
