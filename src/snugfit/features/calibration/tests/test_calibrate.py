"""Calibration of invented machines: it must find the hardware rates that were changed."""

from __future__ import annotations

import json
import re
import shlex
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from small_models import small_job
from snugfit.cli.main import run
from snugfit.cli.plan_cache import key_of
from snugfit.errors import GpuError, SnugfitError
from snugfit.features.calibration import host_probe
from snugfit.features.calibration.calibrate import (
    ATTEMPTS,
    Calibration,
    MeasureSeconds,
    ProbeReading,
    ProbeSeconds,
    SteadyClock,
    _llama,
    calibrate,
    probes,
)
from snugfit.features.calibration.command import sentence_about_others
from snugfit.features.calibration.feature import CalibrationFeature
from snugfit.features.calibration.host_probe import FIELDS, host_at, measure_prices
from snugfit.features.calibration.power_fit import fit_power
from snugfit.job.gpu import find_gpu
from snugfit.job.job import Job
from snugfit.prediction.device import policy_for
from snugfit.prediction.predict import predict
from snugfit.prediction.profile import Software
from snugfit.prediction.rates import Rates, calibration_file, rates_for
from snugfit.prediction.seconds import step_seconds
from snugfit.rehearsal.device.policy import Policy
from snugfit.rehearsal.rehearse import rehearse
from snugfit.rehearsal.trace.trace import ALL_GATHER, ALL_REDUCE, COLLECTIVES, Trace
from snugfit.results.step_seconds import StepSeconds
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.setup import Setup
from snugfit.techniques.several_gpus import job_of_rank, on_gpus
from snugfit.techniques.wish import processes_of
from test_docs import OF_CALIBRATION, answered, commands
from test_reference import hold_to_schema

__all__ = ["answered"]

pytestmark = [pytest.mark.stored_rehearsals, pytest.mark.whole]

GPU = find_gpu("h200")


@pytest.fixture(autouse=True)
def no_calibration_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNUGFIT_RATES", str(tmp_path / "rates"))
    # invented machines match their predictions
    monkeypatch.setattr("snugfit.features.calibration.calibrate.PROBE_ERRORS", {})
    monkeypatch.setattr("snugfit.features.calibration.calibrate.rehearse", rehearsed)


def llama_of_few_layers(*, layers: int, **sizes: int) -> Job:
    """Return the job of a probe with at most four layers: the invented machine needs no more."""
    return _llama(layers=min(layers, 4), **sizes)


TRACES: dict[str, Trace] = {}
REHEARSING = threading.Lock()
"""Lock for `TRACES`: an invented machine rehearses in parallel to the calibration. A real machine does
not."""


def rehearsed(job: Job, setup: Setup, policy: Policy) -> Trace:
    """Simulate each probe (small training job) once, because every test uses the same few."""
    key = json.dumps([job.to_json(), setup.to_json(), repr(policy)])
    with REHEARSING:
        if key not in TRACES:
            TRACES[key] = rehearse(job, setup, policy)
        return TRACES[key]


def machine(rates: Rates, job: Job, recipe: Recipe) -> float:
    """Return the seconds of a step on an invented machine with these hardware rates."""
    return step_on(rates, job, recipe).step_seconds


def step_on(rates: Rates, job: Job, recipe: Recipe) -> StepSeconds:
    """Return the predicted step on an invented machine with these hardware rates, on all of its GPUs if the
    recipe needs several.
    """
    setup = recipe.setup()
    setup = on_gpus(setup, rates.gpus) if processes_of(setup) else setup
    trace = rehearsed(job_of_rank(job, setup), setup, policy_for(GPU, Software()))
    return step_seconds(trace, GPU, batch_size=job.batch_size, rates=rates)


def quiet(rates: Rates) -> MeasureSeconds:
    """Return a function that measures on the invented machine, whose CPU no other process uses."""
    return lambda job, recipe, _: ProbeSeconds(machine(rates, job, recipe), 0.0)


def rates_and_readings(*arguments: Any, **options: Any) -> tuple[Rates, tuple[ProbeReading, ...]]:
    options.setdefault("machine", lambda: {"why": "invented"})
    calibration = calibrate(*arguments, **options)
    return calibration.rates, calibration.readings


def other_machine() -> Rates:
    known = rates_for(GPU)
    products = {name: replace(rate, flops=rate.flops * 0.6) for name, rate in known.products.items()}
    patterns = {name: (rate * 0.7, start) for name, (rate, start) in known.patterns.items()}
    return replace(
        known,
        host=known.host.slower(2.5),
        products=products,
        patterns=patterns,
        bandwidth=known.bandwidth * 0.7,
    )


def test_another_machine_is_found() -> None:
    true = other_machine()
    found, readings = rates_and_readings(GPU, measure_seconds=quiet(true))
    assert found.host.forward == pytest.approx(true.host.forward, rel=0.05)
    assert found.bandwidth == pytest.approx(true.bandwidth, rel=0.1)
    for name, rate in found.products.items():
        assert rate.flops == pytest.approx(true.products[name].flops, rel=0.15)
    assert found.measured
    assert [reading.probe.corrects for reading in readings[:4]] == ["host", "host", "host", "bandwidth"]
    job, recipe = small_job("gpt2", 3), Recipe.parse("bf16")
    assert machine(found, job, recipe) == pytest.approx(machine(true, job, recipe), rel=0.05)


def test_on_several_gpus_the_host_is_measured_while_all_work_and_exchanges_are_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("snugfit.features.calibration.calibrate._llama", llama_of_few_layers)
    known = replace(rates_for(GPU), gpus=4)
    host = replace(known.host.slower(1.4), shard_hook=6e-4)
    bus = {ALL_REDUCE: 0.5, **dict.fromkeys(COLLECTIVES - {ALL_REDUCE}, 0.3)}
    true = replace(known, host=host, bus=bus)

    def measure_all(job: Job, recipe: Recipe, _: int) -> ProbeSeconds:
        step = step_on(true, job, recipe)
        return ProbeSeconds(step.step_seconds, 0.0, step.communication_seconds or None)

    found, readings = rates_and_readings(GPU, gpus=4, measure_seconds=measure_all)
    assert [reading.probe.corrects for reading in readings[-3:]] == ["sharding", ALL_REDUCE, ALL_GATHER]
    assert found.host.forward == pytest.approx(host.forward, rel=0.05)
    assert found.host.shard_hook == pytest.approx(host.shard_hook, rel=0.1)
    for kind, share in bus.items():
        assert found.bus[kind] == pytest.approx(share, rel=0.15), kind
    assert found.gpus == 4


def test_predictions_take_the_calibration_of_as_many_gpus_else_that_of_one() -> None:
    alone, all_four = (replace(rates_for(GPU), source=source) for source in ("one", "four"))
    for rates, gpus in ((alone, 1), (all_four, 4)):
        file = calibration_file(GPU, gpus)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"rates": rates.to_json()}))
    assert [rates_for(GPU, gpus).source for gpus in (1, 2, 4)] == ["one", "one", "four"]


def test_the_machine_that_is_known_changes_nothing() -> None:
    known = rates_for(GPU)
    found, _ = rates_and_readings(GPU, measure_seconds=quiet(known))
    assert found.host.forward == pytest.approx(known.host.forward)
    assert found.products["bf16"] == known.products["bf16"]


def power_rows() -> list[dict[str, Any]]:
    """Return the rows of the recorded probes of an H200 that `snugfit calibrate` measures too."""
    file = Path(__file__).parents[5] / "results" / "h200-2026-11-30" / "power.json"
    kept = re.compile(r"wait|add|(half )?(bf16|fp16|tf32|fp32) (8192|4096) cubed|attention both")
    return [row for row in json.loads(file.read_text())["rows"] if kept.match(row["name"])]


def test_the_probes_of_power_give_the_constants_of_the_measured_gpu() -> None:
    known = rates_for(GPU).power
    assert known is not None
    doubled = replace(
        known,
        limit_watts=350.0,
        idle_watts=60.0,
        byte_joules=2 * known.byte_joules,
        flop_joules={kind: 2 * joules for kind, joules in known.flop_joules.items()},
        elasticity=0.3,
    )
    found = fit_power(power_rows(), doubled)
    assert found.limit_watts == pytest.approx(known.limit_watts, rel=0.02)
    assert found.idle_watts == pytest.approx(known.idle_watts, rel=0.01)
    assert found.byte_joules == pytest.approx(known.byte_joules, rel=0.02)
    assert found.elasticity == pytest.approx(known.elasticity, abs=0.03)
    assert found.flop_joules == pytest.approx(known.flop_joules, rel=0.11)
    with pytest.raises(ValueError, match="the power of add and wait was not measured"):
        fit_power([], known)


def test_a_probe_at_the_power_limit_is_predicted_at_its_clock() -> None:
    """The machine runs at 0.8 of the highest clock, where its rates are the known ones."""
    known = rates_for(GPU)
    assert known.power is not None
    slow = replace(known, power=SteadyClock(**asdict(known.power), share=0.8))

    def limited(job: Job, recipe: Recipe, _: int) -> ProbeSeconds:
        return ProbeSeconds(machine(slow, job, recipe), 0.0, mhz=0.8 * 1980)

    found, _ = rates_and_readings(
        GPU, measure_seconds=limited, machine=lambda: {"power": {"rows": power_rows()}}
    )
    assert found.products["bf16"].flops == pytest.approx(known.products["bf16"].flops, rel=0.02)
    assert found.power is not None
    assert found.power.limit_watts == pytest.approx(known.power.limit_watts, rel=0.02)


def test_prices_of_the_host_replace_its_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = dict.fromkeys(FIELDS, 1e-5)
    monkeypatch.setattr("snugfit.features.calibration.calibrate.PACKAGED_PRICES", packaged)
    known = rates_for(GPU)
    prices = {name: 2e-5 if name == "backward" else 1e-5 for name in FIELDS if name != "program"}
    found, readings = rates_and_readings(
        GPU, measure_seconds=quiet(known), machine=lambda: {"host": {"prices": prices}}
    )
    assert found.host.backward == pytest.approx(2 * known.host.backward)
    assert found.host.forward == pytest.approx(known.host.forward)
    # Compiled programs failed, so they have the geometric mean of the other seven.
    assert found.host.generated == pytest.approx(2 ** (1 / 7) * known.host.generated)
    assert "host" not in {reading.probe.corrects for reading in readings}
    assert found.calibrated
    # A price of zero is no measurement, and without any other price the costs stay.
    none = {"module": 0.0}
    assert host_at(known.host, prices | none, packaged).module < 2 * known.host.module
    assert host_at(known.host, none, packaged) == known.host


def test_prices_are_measured_without_a_gpu_too() -> None:
    measured = measure_prices("cpu", slices=2, compiled=False)
    assert measured["prices"].keys() == FIELDS.keys() - {"program"}
    assert all(seconds >= 0 for seconds in measured["prices"].values())
    assert not measured["failed"]


def test_the_price_of_modules_needs_that_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> float:
        raise RuntimeError("out of memory")

    works = [("launch", fail, 1), ("module", lambda: 3e-6, 1), ("tensor", lambda: 1e-6, 1)]
    monkeypatch.setattr(host_probe, "_works", lambda device, compiled: works)
    measured = measure_prices("cpu", slices=2)
    assert measured["prices"] == {"tensor": 1e-6}
    assert measured["failed"] == {"launch": "out of memory"}


def test_a_probe_s_own_error_is_no_machine_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with only the usual prediction errors of the probes gets the known rates."""
    errors = {"host": 0.9, "bandwidth": 1.05, "fp32": 0.95, "tf32": 1.02, "bf16": 1.04}
    monkeypatch.setattr("snugfit.features.calibration.calibrate.PROBE_ERRORS", errors)
    known, asked = rates_for(GPU), iter(("bandwidth", "host", "host", "host", "fp32", "tf32", "bf16"))
    found, _ = rates_and_readings(
        GPU,
        measure_seconds=lambda job, recipe, _: ProbeSeconds(
            machine(known, job, recipe) * errors[next(asked)]
        ),
    )
    assert found.host.forward == pytest.approx(known.host.forward)
    assert found.bandwidth == pytest.approx(known.bandwidth)
    assert found.products["fp32"].flops == pytest.approx(known.products["fp32"].flops)


def test_the_host_is_measured_again_while_others_use_it() -> None:
    """Here two runs of each host probe are slow and disturbed by other processes, and the third is not."""
    known, asked = rates_for(GPU), dict[str, int]()

    def crowded(job: Job, recipe: Recipe, _: int) -> ProbeSeconds:
        key = f"{job.model.config['num_hidden_layers']} {recipe}"
        asked[key] = asked.get(key, 0) + 1
        calm = asked[key] == ATTEMPTS or job.model.config["num_hidden_layers"] < 16
        return ProbeSeconds(machine(known, job, recipe) * (1.0 if calm else 1.7), 0.0 if calm else 0.6)

    found, readings = rates_and_readings(GPU, measure_seconds=crowded)
    assert found.host.forward == pytest.approx(known.host.forward)
    assert {reading.disturbed for reading in readings} == {0.0}
    assert sorted(asked.values()) == [1] * (len(readings) - 3) + [ATTEMPTS] * 3


def test_where_others_never_leave_the_least_disturbed_run_counts_and_it_is_said() -> None:
    known, shares = rates_for(GPU), iter([0.9, 0.4, 0.6] * 3)

    def crowded(job: Job, recipe: Recipe, _: int) -> ProbeSeconds:
        if job.model.config["num_hidden_layers"] < 16:
            return ProbeSeconds(machine(known, job, recipe))
        return ProbeSeconds(machine(known, job, recipe), next(shares))

    _, readings = rates_and_readings(GPU, measure_seconds=crowded)
    assert [reading.disturbed for reading in readings if reading.probe.corrects == "host"] == [0.4] * 3
    assert "40 % of the checks" in sentence_about_others(readings)
    assert not sentence_about_others([replace(reading, disturbed=0.1) for reading in readings])


def test_a_probe_that_dies_corrects_nothing_and_says_why() -> None:
    def dies(job: Job, recipe: Recipe, steps: int) -> ProbeSeconds:
        raise SnugfitError("The probe's run ended with oom.")

    found, readings = rates_and_readings(GPU, measure_seconds=dies)
    assert found.host == rates_for(GPU).host
    assert all(reading.factor is None and "oom" in reading.why for reading in readings)
    assert len(readings) > 3


def test_a_probe_without_kernels_of_its_rate_corrects_nothing_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("snugfit.features.calibration.calibrate._seconds_of_rate", lambda *_: 0.0)
    _, readings = rates_and_readings(GPU, measure_seconds=quiet(other_machine()))
    assert {reading.why for reading in readings} == {"no kernel of its step depends on this rate"}


def test_what_was_found_is_used_from_then_on() -> None:
    job = small_job("bert", 2)
    before, other = predict(job, gpu=GPU).timing, other_machine()
    file = calibration_file(GPU)
    file.parent.mkdir(parents=True)
    remembered_as = key_of(job, GPU)
    file.write_text(json.dumps({"rates": other.to_json()}))
    assert key_of(job, GPU) != remembered_as, "a plan from before would be read from the cache"
    assert rates_for(GPU).host == other.host
    after = predict(job, gpu=GPU).timing
    assert before
    assert after
    assert after.step_seconds > 2 * before.step_seconds


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rates": {"gpu": 1}}', "x" * (2 << 20)])
def test_a_calibration_that_cannot_be_read_is_refused(text: str) -> None:
    file = calibration_file(GPU)
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.raises(GpuError, match="is not a calibration that this snugfit can read"):
        rates_for(GPU)


def test_one_that_cannot_be_read_can_be_made_again() -> None:
    file = calibration_file(GPU)
    file.parent.mkdir(parents=True)
    known = rates_for(GPU)
    file.write_text("damaged")
    found, _ = rates_and_readings(GPU, measure_seconds=quiet(known))
    assert found.host.forward == pytest.approx(known.host.forward)


def test_what_no_probe_told_is_not_called_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every probe fails, so no hardware rate counts as measured."""
    step = rehearse(small_job("llama", 1), Recipe().setup(), policy_for(GPU, Software()))
    monkeypatch.setattr("snugfit.features.calibration.calibrate.rehearse", lambda *_: step)

    def dies(job: Job, recipe: Recipe, steps: int) -> ProbeSeconds:
        raise SnugfitError("The probe's run ended with oom.")

    found, _ = rates_and_readings(find_gpu("a100-80gb"), measure_seconds=dies)
    assert not found.measured


def test_its_document_is_valid_against_the_schema() -> None:
    reading = ProbeReading(
        probe=probes(("bf16",))[0], predicted_seconds=0.1, measured_seconds=None, factor=None
    )
    rates = rates_for(find_gpu("h200"))
    printed = Calibration(gpus=1, rates=rates, readings=(reading,), versions={"torch": "2"})
    hold_to_schema(CalibrationFeature().documents(), [("calibrate --json", printed)])


@pytest.mark.parametrize("command", [one for one in commands() if OF_CALIBRATION.match(one)])
def test_a_command_of_the_docs_is_understood(
    command: str, answered: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calibration = Calibration(gpus=1, rates=rates_for(find_gpu("h200")), readings=(), versions={})
    monkeypatch.setattr("snugfit.features.calibration.calibrate.calibrate", lambda *_, **__: calibration)
    monkeypatch.setattr("snugfit.features.calibration.command.gpu_here", lambda *_: "NVIDIA H200")
    assert run(shlex.split(command)) == 0, capsys.readouterr().err
