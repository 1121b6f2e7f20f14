"""The clock of a GPU at its power limit: the probes of one H200, and the seconds of predicted steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from snugfit.job.gpu import find_gpu
from snugfit.planning.cost.timer import GpuTimers
from snugfit.prediction.power import PowerRates
from snugfit.prediction.rates import Rates, packaged_rates
from snugfit.prediction.seconds import step_seconds
from snugfit.rehearsal.trace.trace import Kernel, Trace
from snugfit.report.short import about_clock

PROBES = Path(__file__).resolve().parents[1] / "results" / "h200-2026-11-30" / "power.json"
H200 = find_gpu("h200")


def power_of(gpu: str) -> PowerRates | None:
    return packaged_rates(find_gpu(gpu)).power


def kernel(operator: str, flops: int, nbytes: int, *shapes: tuple[int, ...]) -> Kernel:
    return Kernel(
        operator=operator, module="", phase="forward", flops=flops, nbytes=nbytes, shapes=shapes,
        dtype="torch.bfloat16", tensors=3,
    )  # fmt: skip


def trace_of(*kernels: Kernel) -> Trace:
    return Trace((), (), (), kernels, (), ())


PRODUCT = kernel("aten::mm", 2 * 8192**3, 3 * 2 * 8192**2, (8192, 8192), (8192, 8192))
SUM = kernel("aten::add", 0, 2**30)


def probes() -> list[dict[str, object]]:
    rows = json.loads(PROBES.read_text())["rows"]
    return [row for row in rows if row.get("kernel_flops") and not row["half"]]


@pytest.mark.parametrize("row", probes(), ids=lambda row: row["name"])
def test_the_steady_seconds_of_measured_kernels_follow_from_their_first_ones(row: dict[str, float]) -> None:
    power = power_of("h200")
    assert power is not None
    name = str(row["name"])
    per_flop = power.flop_joules["attention" if "attention" in name else name.split(maxsplit=1)[0]]
    first = row["burst_seconds"]
    work = (first, row["kernel_flops"] * per_flop, row["kernel_bytes"] * power.byte_joules)
    predicted = first * power.slowdown(power.clock(first, work))
    assert predicted == pytest.approx(row["launch_seconds"], rel=0.06)


def test_at_the_steady_clock_the_mean_power_is_the_limit() -> None:
    power = power_of("h200")
    assert power is not None
    seconds, clocked, arithmetic, traffic = 1.0, 0.8, 700.0, 100.0
    clock = float(power.clock(seconds, (clocked, arithmetic, traffic)))
    length = seconds + clocked * (power.slowdown(clock) - 1)
    assert clock < 1
    assert power.idle_watts + (arithmetic * clock + traffic) / length == pytest.approx(power.limit_watts)


def test_steps_below_the_limit_keep_the_highest_clock() -> None:
    power = power_of("h200")
    assert power is not None
    clocks = power.clock(np.array([1.0, 1.0]), np.array([[0.5, 0.9], [100.0, 900.0], [50.0, 50.0]]))
    assert clocks[0] == 1 > clocks[1]


def test_a_step_of_large_products_is_power_limited_and_one_of_sums_is_not() -> None:
    limited = step_seconds(trace_of(*[PRODUCT] * 8), H200, batch_size=1)
    free = step_seconds(trace_of(*[SUM] * 8), H200, batch_size=1)
    without = step_seconds(
        trace_of(*[PRODUCT] * 8), H200, batch_size=1, rates=replace(packaged_rates(H200), power=None)
    )
    assert free.limited_mhz is None
    assert limited.limited_mhz is not None
    assert 1300 < limited.limited_mhz < 1700
    assert limited.step_seconds > 1.15 * without.step_seconds
    assert sum(line.device_seconds for line in limited.phases) == pytest.approx(limited.device_seconds)


def test_plans_estimate_the_same_seconds_as_predictions() -> None:
    trace = trace_of(*[PRODUCT, SUM] * 6)
    (estimated,) = GpuTimers([H200])(trace)
    assert estimated == pytest.approx(step_seconds(trace, H200, batch_size=1).step_seconds, rel=1e-3)


def test_only_the_same_chip_at_the_same_clock_has_the_measured_power() -> None:
    assert power_of("h100-sxm") == power_of("h200")
    assert power_of("rtx 4090") is None
    assert power_of("h100-pcie") is None


def test_rates_without_power_are_read_and_written() -> None:
    rates = packaged_rates(H200)
    assert Rates.from_json(rates.to_json()) == rates
    older = {name: value for name, value in rates.to_json().items() if name != "power"}
    assert Rates.from_json(older).power is None


def test_a_report_names_the_limited_clock() -> None:
    timing = step_seconds(trace_of(PRODUCT), H200, batch_size=1)
    assert "power-limited, about 1," in about_clock(timing)
    assert about_clock(replace(timing, limited_mhz=None)) == ""
