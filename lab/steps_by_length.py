"""Measure steps of three models at many lengths, aligned and not, for comparison with `snugfit lengths`.

    python lab/steps_by_length.py OUT.json

Each length is a job of its own. Jobs run one after the other in this process on quiet cores
(`measurement/quiet_core.py`). Events time their steady steps.
"""

from __future__ import annotations

import gc
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from profile_kernels import write

from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.measurement.quiet_core import QuietCore
from snugfit.measurement.stopwatch import Stopwatch
from snugfit.step.open_step import open_step
from snugfit.techniques.recipe import Recipe

WARMUP, TIMED = 3, 12
MODELS = (
    ("bert-large-uncased", "sequence-classification", 32, "bf16 + adamw_fused",
     (96, 127, 128, 129, 136, 192, 200, 255, 256, 257, 264, 320, 383, 384, 449, 456, 511, 512)),
    ("openai-community/gpt2-large", "causal-lm", 8, "bf16 + adamw_fused",
     (127, 128, 129, 256, 257, 264, 384, 509, 512, 700, 704, 1000, 1001, 1024)),
    ("meta-llama/Llama-3.2-1B", "causal-lm", 8, "eager + bf16 + adamw_fused",
     (127, 128, 129, 136, 256, 257, 384, 509, 512, 700, 701, 704)),
)  # fmt: skip


def measure_length(job: Job, recipe: Recipe) -> dict[str, Any]:
    """Run one job and return its row."""
    core, device = QuietCore(), torch.device("cuda")
    stopwatch = Stopwatch(device, WARMUP, core=core)
    open_step(job, recipe.setup(), "plain", device).run(WARMUP + TIMED, stopwatch)
    seconds = stopwatch.seconds()
    core.release()
    return {
        "job": job.to_json(),
        "recipe": str(recipe),
        "step_seconds": statistics.median(seconds),
        "seconds": seconds,
        "disturbed": core.disturbed_share(),
    }


def main() -> None:
    """Run the jobs, print a line for each length, and write the output file."""
    runs = []
    for name, task, batch, recipe, lengths in MODELS:
        for length in lengths:
            sizes = {"batch_size": batch, "sequence_length": length}
            job = Job(model=Model.find(name), task=Task.parse(task), dtype="float32", **sizes)  # type: ignore[arg-type]
            runs.append(measure_length(job, Recipe.parse(recipe)))
            print(f"{name}, {length}: {1e3 * runs[-1]['step_seconds']:.1f} ms", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    write(Path(sys.argv[1]), "steps-by-length", runs)


if __name__ == "__main__":
    main()
