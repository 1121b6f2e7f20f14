"""Time the host's phases of a step, on all ranks at once, one recipe beside another.

    torchrun --standalone --nproc-per-node N lab/time_rank_phases.py RUNS.json OUT.json RECIPE...

RUNS.json is a file of `snugfit accuracy`. Its jobs run with two samples on each GPU, so that the host bounds
them. A recipe for one GPU runs on all of them independently. So both recipes include the cost of other
processes on the same host.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from snugfit.features.accuracy.files import read
from snugfit.job.job import Job
from snugfit.step.open_step import open_step
from snugfit.step.step import Observer
from snugfit.techniques.recipe import Recipe
from snugfit.techniques.several_gpus import job_of_rank, on_gpus
from snugfit.versions import versions

STEPS, FIRST = 16, 4
"""Steps of a run, and the first of them that counts."""

SAMPLES, LONGEST = 2, 128
"""Samples of a GPU's micro-batch, and the most tokens of a sample."""


class Clock(Observer):
    """An observer that times each phase of each step on the host, without waits between them."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._since, self._phase = 0.0, ""

    def step_begins(self, index: int) -> None:
        """Start the clock of a step."""
        self.steps.append({})
        self._since, self._phase = time.perf_counter(), ""

    def phase(self, name: str) -> None:
        """End the phase before this one, and begin this one."""
        self._close()
        self._phase = name

    def step_ends(self, index: int) -> None:
        """End the last phase."""
        self._close()

    def _close(self) -> None:
        now = time.perf_counter()
        if self._phase:
            step = self.steps[-1]
            step[self._phase] = step.get(self._phase, 0.0) + now - self._since
        self._since = now

    def medians(self) -> dict[str, float]:
        """Return the seconds of each phase in a steady step."""
        steady = self.steps[FIRST:]
        names = sorted({name for step in steady for name in step})
        return {name: statistics.median(step.get(name, 0.0) for step in steady) for name in names}


def main() -> None:
    """Run every recipe on every job. Rank 0 writes its own phases and the length of a step on each rank."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rows: list[dict[str, Any]] = []
    for run in read(Path(sys.argv[1])).runs:
        for text in sys.argv[3:]:
            row = time_phases(run.job, text, device)
            if dist.get_rank() == 0:
                rows.append({"family": run.family, "number": run.number, **row})
                document = {
                    "what": "seconds of the host by phase",
                    "ranks": dist.get_world_size(),
                    "device": torch.cuda.get_device_name(device),
                    "versions": versions(),
                    "when": time.strftime("%Y-%m-%dT%H:%M:%S"),
                    "runs": rows,
                }
                Path(sys.argv[2]).write_text(json.dumps(document, indent=1))
    dist.destroy_process_group()


def time_phases(job: Job, text: str, device: torch.device) -> dict[str, Any]:
    """Time one recipe on one reduced job."""
    recipe, ranks = Recipe.parse(text), dist.get_world_size()
    setup = recipe.setup()
    gpus = ranks if setup.parallel else 1
    length = min(job.sequence_length, LONGEST)
    job = replace(job, batch_size=SAMPLES * setup.micro_batches * gpus, sequence_length=length, padding=0.0)
    setup, clock = on_gpus(setup, gpus), Clock()
    torch.manual_seed(0)
    open_step(job_of_rank(job, setup), setup, "plain", device).run(STEPS, clock)
    torch.cuda.synchronize(device)
    phases = clock.medians()
    lengths: list[float] = [0.0] * ranks
    dist.all_gather_object(lengths, sum(phases.values()))
    gc.collect()
    torch.cuda.empty_cache()
    return {"recipe": text, "gpus": gpus, "clip": job.clip, "phases": phases, "steps_by_rank": lengths}


if __name__ == "__main__":
    main()
