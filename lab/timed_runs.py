"""Measure drawn runs on a GPU one after the other in one process, with the prices of the host beside them.

    python lab/timed_runs.py OUT.json DRAWN.json [--seconds 60] [--device cuda] [--steps 120]
    python lab/timed_runs.py OUT.json DRAWN.json --probes    # the host probes of earlier calibrations too

DRAWN.json is a file of `draw_runs.py`. Each run has the mean seconds of its undisturbed steps, and the mean
clock, watts and temperature of its timed steps. It has the allocator's peaks too, and the bytes that earlier
runs left behind. The prices of `host_probe.py` are measured before and after.
Predictions are made later (`lab/host_rules.py`), so that the GPU waits for none.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from snugfit.documents import write_document
from snugfit.errors import one_line
from snugfit.features.calibration.host_probe import measure_prices
from snugfit.features.calibration.power_probe import PowerReadings
from snugfit.job.job import Job
from snugfit.measurement.quiet_core import QuietCore
from snugfit.measurement.stopwatch import Stopwatch, steady_steps, timing_of
from snugfit.step.open_step import open_step
from snugfit.techniques.recipe import Recipe
from snugfit.versions import versions

WARMUP = 5
READ_SECONDS = 0.1
"""Seconds between two readings of the clock. More frequent ones would delay the thread of the loop."""

OF_HOST = ("sgd", "bf16 + every_layer", "eager + bf16")


class Clock:
    """Clock, watts and temperature of the GPU, read in a thread; nothing on the CPU."""

    def __init__(self, device: str) -> None:
        self.rows: list[tuple[float, int, float, int]] = []
        self._readings = PowerReadings() if device == "cuda" else None
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        import pynvml as nvml

        while self._readings:
            handle = self._readings.handle
            with suppress(nvml.NVMLError):
                self.rows.append((
                    time.monotonic(), nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                    nvml.nvmlDeviceGetPowerUsage(handle) / 1e3, nvml.nvmlDeviceGetTemperature(handle, 0),
                ))  # fmt: skip
            time.sleep(READ_SECONDS)

    def since(self, begin: float) -> dict[str, Any]:
        """Return the means since this time of the monotonic clock."""
        rows = [row[1:] for row in self.rows if row[0] >= begin]
        if not rows:
            return {}
        names = ("mhz", "watts", "degrees")
        return {
            name: statistics.fmean(part) for name, part in zip(names, zip(*rows, strict=True), strict=True)
        }


def forget_earlier_runs() -> int:
    """Free what earlier runs left in the allocator, and return the bytes that stay allocated."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peaks() -> dict[str, int]:
    """Return the peaks of the allocator since the last reset, in bytes."""
    stats = torch.cuda.memory_stats()
    return {
        f"{kind}_bytes": stats[f"{kind}_bytes.all.peak"] for kind in ("requested", "allocated", "reserved")
    }


def timed(job: Job, recipe: Recipe, steps: int, device: str, clock: Clock) -> dict[str, Any]:
    """Return the seconds and the peaks of one run."""
    left = forget_earlier_runs() if device == "cuda" else 0
    core = QuietCore()
    step = open_step(job, recipe.setup(), "plain", torch.device(device))
    watch = Stopwatch(torch.device(device), WARMUP, core=core)
    try:
        step.run(WARMUP + steps, watch)
        timing = timing_of(watch.seconds(), job.batch_size, watch.quiet())
    finally:
        core.release()
    assert timing is not None
    row = {"step_seconds": timing.step_seconds, "spread": timing.spread, "steps": timing.steps}
    row |= peaks() | {"left_bytes": left} if device == "cuda" else {}
    row |= {"every_step_seconds": timing.every_seconds, "disturbed": core.disturbed_share()}
    return row | {"loop_seconds": core.loop_seconds()} | clock.since(watch.timed_from or 0.0)


def runs(file: Path, *, probes: bool) -> Iterator[tuple[Job, str, float | None]]:
    """Yield job, recipe and predicted seconds of the probes and of each drawn run."""
    if probes:
        from snugfit.features.calibration.calibrate import _llama

        small = _llama(layers=16, width=512, vocabulary=8_000, batch=4, length=64)
        for recipe in OF_HOST:
            yield small, recipe, 0.025
    for run in json.loads(file.read_text(encoding="utf-8"))["runs"]:
        if not run["refused"]:
            yield Job.from_json(run["job"]), run["recipe"], run["predicted_step_seconds"]


def main() -> None:
    """Time the runs and write the file after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("drawn", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--probes", action="store_true")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    document: dict[str, Any] = {"what": "timed runs", "versions": versions(), "rows": []}
    if given.device == "cuda":
        document["gpu"] = torch.cuda.get_device_name()
    document["host"] = measure_prices(given.device)
    clock = Clock(given.device)
    for job, recipe, predicted in runs(given.drawn, probes=given.probes):
        if time.monotonic() > end:
            break
        row: dict[str, Any] = {"job": job.to_json(), "recipe": recipe}
        try:
            steps = min(given.steps, steady_steps(predicted))
            row |= timed(job, Recipe.parse(recipe), steps, given.device, clock)
        except Exception as refused:  # the next runs are measured all the same
            row["refused"] = one_line(refused)
        document["rows"].append(row)
        print(row.get("step_seconds"), row.get("mhz"), job.model.name, recipe, file=sys.stderr, flush=True)
        write_document(given.out, document)
    document["host_after"] = measure_prices(given.device)
    write_document(given.out, document)


if __name__ == "__main__":
    main()
