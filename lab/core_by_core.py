"""Time the same step on each core of the host twice, which shows the load of other guests on each core.

    python lab/core_by_core.py OUT.json

A small BERT runs steady steps with next to no work for the GPU. After every `STEPS` steps all threads of the
process move to the next core. After each round the system may place them freely. A row of each stay holds the
seconds of its steps, and those of a loop of pure Python on that core. `measurement/quiet_core.py` relies on
these figures.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from profile_kernels import FAMILIES, small_job, time_loop, write

from snugfit.step.open_step import open_step
from snugfit.techniques.recipe import Recipe

WARMUP, STEPS, ROUNDS = 20, 30, 2


class Walk:
    """An observer that moves to the next core at step boundaries, and records the start of each step."""

    def __init__(self, stays: list[set[int]]) -> None:
        self.stays = stays
        """Cores of each stay."""
        self.begins: list[float] = []
        """Clock times of the step starts, in seconds."""
        self.loop_seconds: list[float] = []
        """Seconds of a loop of pure Python, at the beginning of each stay."""

    def build_ends(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Do nothing, because only beginnings of steps count."""

    def phase(self, name: str) -> None:
        """Do nothing, because only beginnings of steps count."""

    def step_begins(self, index: int) -> None:
        """Move all threads to the next core, every `STEPS` steps."""
        stay, turn = divmod(index - WARMUP, STEPS)
        if stay >= 0 and turn == 0 and stay < len(self.stays):
            for thread in os.listdir("/proc/self/task"):
                with suppress(OSError):
                    os.sched_setaffinity(int(thread), self.stays[stay])
            self.loop_seconds.append(time_loop())
        self.begins.append(time.perf_counter())

    def step_ends(self, index: int) -> None:
        """Do nothing, because only beginnings of steps count."""

    def seconds(self, stay: int) -> list[float]:
        """Return the seconds of the steps of one stay."""
        first = WARMUP + stay * STEPS
        marks = self.begins[first : first + STEPS]
        return [end - begin for begin, end in pairwise(marks)]


def main() -> None:
    """Run the stays, print a line for each one, and write the output file."""
    cores = sorted(os.sched_getaffinity(0))
    stays = [*({core} for core in cores), set(cores)] * ROUNDS
    walk = Walk(stays)
    job = small_job(next(family for family in FAMILIES if family.name == "bert"), depth=12)
    step = open_step(job, Recipe.parse("bf16").setup(), "plain", torch.device("cuda"))
    step.run(WARMUP + STEPS * len(stays) + 1, walk)
    runs: list[dict[str, Any]] = []
    for number, stay in enumerate(stays):
        seconds = walk.seconds(number)
        runs.append({"cores": sorted(stay), "seconds": seconds, "pace": walk.loop_seconds[number]})
        print(f"{runs[-1]['cores']}: {1e3 * statistics.median(seconds):.1f} ms")
    write(Path(sys.argv[1]), "core-by-core", runs)


if __name__ == "__main__":
    main()
