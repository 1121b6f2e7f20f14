"""The GPU's clock while steps were timed: read, cut to those seconds, and reported if it was lowered."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from fake_nvml import FakeGpu, FakeNvml, NvmlError
from snugfit.measurement.clock import ClockReading, clock_between, read_clock
from snugfit.measurement.nvml import Card, NvmlUnavailable, open_nvml
from snugfit.measurement.sampler import Sampler
from snugfit.results.measurement import GpuClock

POWER, HEAT, IDLE = 0x04, 0x40, 0x01
LOWERED = GpuClock(mean_mhz=1700.4, lowest_mhz=1590, highest_mhz=1980, readings=40, reasons={"power": 0.9})


def card_of(gpu: FakeGpu) -> Card:
    return open_nvml(FakeNvml(gpu)).cards()[0]


def test_readings_outside_the_timed_steps_do_not_count() -> None:
    card = card_of(FakeGpu(clocks=[1980]))
    readings = [
        ClockReading(1.0, 345, IDLE),
        ClockReading(2.0, 1980, 0),
        ClockReading(3.0, 1600, POWER),
        ClockReading(4.0, 1700, POWER | HEAT),
        ClockReading(5.0, 345, IDLE),
    ]
    clock = clock_between(readings, card, 1.5, 4.5)
    assert clock is not None
    assert (clock.mean_mhz, clock.lowest_mhz, clock.highest_mhz, clock.readings) == (1760.0, 1600, 1980, 3)
    assert clock.reasons == pytest.approx({"power": 2 / 3, "heat": 1 / 3})
    assert clock_between(readings, card, 5.5, 6.0) is None
    assert clock_between(readings, card, None, 4.5) is None


@pytest.mark.parametrize(
    ("clock", "said"),
    [
        (LOWERED, "1,700 of 1,980 MHz on average, 1,590 at the lowest (power in 90 % of 40 readings)"),
        (replace(LOWERED, mean_mhz=1960.0), None),
        (replace(LOWERED, reasons={}), None),
    ],
)
def test_a_lowered_clock_is_said_with_its_reason(clock: GpuClock, said: str | None) -> None:
    assert clock.fall == said


def test_an_older_driver_knows_the_reasons_by_another_name() -> None:
    class Older(FakeNvml):
        nvmlDeviceGetCurrentClocksEventReasons: Any = None

        def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: FakeGpu) -> int:
            return HEAT

    card = open_nvml(Older(FakeGpu(clocks=[1980, 1500]))).cards()[0]
    assert read_clock(card, 7.0) == ClockReading(7.0, 1980, HEAT)
    assert read_clock(card, 8.0).mhz == 1500


@pytest.mark.parametrize("clocks", [None, [0], ["fast"]])
def test_what_is_no_clock_is_not_believed(clocks: Any) -> None:
    card = card_of(FakeGpu(clocks=clocks))
    with pytest.raises(NvmlUnavailable):
        read_clock(card, 0.0)
    with Sampler(card, interval=0.001) as sampler:
        time.sleep(0.05)
    assert not sampler.clocks
    assert sampler.peak_bytes is not None


def test_the_sampler_reads_it_all_along() -> None:
    begin = time.monotonic()
    with Sampler(card_of(FakeGpu(clocks=[1980, 1600], clock_reasons=POWER)), interval=0.001) as sampler:
        while len(sampler.clocks) < 3 and time.monotonic() < begin + 60:
            time.sleep(0.01)
    assert [one.mhz for one in sampler.clocks[:3]] == [1980, 1600, 1600]
    assert all(begin <= one.moment <= time.monotonic() and one.reasons == POWER for one in sampler.clocks)


def test_a_maximum_that_is_refused_is_no_fault() -> None:
    class Silent(FakeNvml):
        def nvmlDeviceGetMaxClockInfo(self, gpu: FakeGpu, kind: int) -> int:
            raise NvmlError("Not Supported")

    card = open_nvml(Silent(FakeGpu(clocks=[1980]))).cards()[0]
    assert clock_between([ClockReading(1.0, 1980, 0)], card, 0.0, 2.0) is None
