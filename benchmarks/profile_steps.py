"""Profile steps on a GPU: what its kernels take, and what its host takes to ask for them.

    python benchmarks/profile_steps.py OUT.json SEED DRAWS

Drawn jobs (`snugfit accuracy` draws them too) and the guide's model under a dozen recipes, one after the
other in this process. Each runs to its steady state and is timed by events (`step_seconds`, the median); then
one step runs under `torch.profiler` (`device_seconds`, the sum of its kernels and copies), and two with the
device drained before each, which shows the host alone (`host_seconds_drained`, by phase). The constants of
`prediction/rates.json` are fitted to such a file; tests predict its device seconds again.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import snugfit
from snugfit.comparison.draw import proposals
from snugfit.errors import SnugfitError
from snugfit.measurement.versions import versions
from snugfit.step.step import open_step

WARMUP, TIMED, DRAINED = 5, 8, 2
RECIPES = (
    "plain", "bf16", "fp16", "tf32", "bf16 + adamw_fused", "every_layer + bf16 + micro_batches(4)",
    "adafactor + bf16", "sgd + bf16", "adamw_8bit + bf16", "adamw_loop + bf16", "eager + bf16",
    "adafactor_torch + bf16", "bf16_pure + adamw_fused",
)  # fmt: skip


class Watch:
    """Times the borders of steps, profiles one, and reads the clock at the phases of the last ones."""

    def __init__(self) -> None:
        self.borders: list[torch.cuda.Event] = []
        self.marks: list[tuple[int, str, float]] = []
        self.index = -1
        self.profiler: Any = None

    def built(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Nothing to note."""

    def phase(self, name: str) -> None:
        """A phase begins."""
        self.marks.append((self.index, name, time.perf_counter()))

    def step_begins(self, index: int) -> None:
        """A border; the profiled step begins with its profiler, and the last ones with a drained device."""
        self.index = index
        if index >= WARMUP + TIMED:
            torch.cuda.synchronize()
        if index == WARMUP + TIMED:
            self.profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self.profiler.__enter__()
        border = torch.cuda.Event(enable_timing=True)
        border.record()
        self.borders.append(border)

    def step_ends(self, index: int) -> None:
        """The profiler stops when the device has ended its work."""
        self.phase("end")
        if index == WARMUP + TIMED:
            torch.cuda.synchronize()
            self.profiler.__exit__(None, None, None)

    def found(self) -> dict[str, Any]:
        """What was seen."""
        pairs = list(zip(self.borders, self.borders[1:], strict=False))[WARMUP : WARMUP + TIMED - 1]
        seconds = [before.elapsed_time(after) / 1000 for before, after in pairs]
        kernels = [kernel for event in self.profiler.events() for kernel in event.kernels]
        host: dict[str, float] = defaultdict(float)
        for (index, name, begin), (_, _, end) in zip(self.marks, self.marks[1:], strict=False):
            if index > WARMUP + TIMED and name != "end":
                host[name] += (end - begin) / DRAINED
        middle = statistics.median(seconds)
        return {
            "step_seconds": middle,
            "spread": (max(seconds) - min(seconds)) / middle,
            "device_seconds": sum(kernel.duration for kernel in kernels) / 1e6,
            "kernels": len(kernels),
            "host_seconds_drained": dict(host),
        }


def jobs(seed: int, draws: int) -> Iterator[tuple[snugfit.Job, snugfit.Recipe]]:
    """The guide's job under each recipe, and the drawn ones."""
    bert = snugfit.Job(
        model=snugfit.Model.find("bert-large-uncased"), task=snugfit.Task.parse("sequence-classification")
    )
    for recipe in RECIPES:
        yield bert, snugfit.Recipe.parse(recipe)
    for number in range(draws):
        drawn = next(proposals(seed, number))
        yield drawn.job, drawn.recipe


def main() -> None:
    """Writes the file that the command line asks for."""
    out, seed, draws = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    runs = []
    for job, recipe in jobs(seed, draws):
        watch = Watch()
        try:
            step = open_step(job, recipe.setup(), "plain", torch.device("cuda"))
            step.run(WARMUP + TIMED + 1 + DRAINED, watch)
        except (SnugfitError, torch.cuda.OutOfMemoryError) as refused:
            print(f"{job.model.name}, {recipe}: {refused}", file=sys.stderr)
            continue
        torch.cuda.synchronize()
        runs.append({"job": job.to_json(), "recipe": str(recipe), **watch.found()})
        del step, watch
        gc.collect()
        torch.cuda.empty_cache()
    document = {
        "schema": 1,
        "what": "profiled-steps",
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions(),
        "runs": runs,
    }
    out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
