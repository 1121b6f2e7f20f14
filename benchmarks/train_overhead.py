"""What training costs over the bare loop, and beside the HF Trainer: the same steps, side by side in one run.

    python benchmarks/train_overhead.py OUT.json [--steps 40] [--turns 4] [--clip 1.0] [RECIPE ...]

BERT-large, 4 x 512, as in Hugging Face's single-GPU guide, under the guide's recipes. For each recipe three
loops take the same number of steps over the same synthetic samples, by turns, in one process:

    bare      the plain loop: no look at loss or gradients, no schedule, no journal, no checkpoint
    snugfit   `training/session.py`: all of that, checkpoints apart (they are timed below)
    trainer   the installed transformers.Trainer with the flags of the same recipe (`step/trainer_loop.py`)

Seconds are those of the wall clock between two steps, the device waited for at both. Of the turns the
fastest counts: a neighbour of a rented host only ever slows one down.

Then checkpoints: how long training waits for one of BERT-large with AdamW, and how long writing takes
beside it.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from snugfit.documents import write_document
from snugfit.job.batch import SyntheticDataset
from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.step.batches import collate
from snugfit.step.quiet_core import QuietCore
from snugfit.step.step import open_step
from snugfit.techniques.recipe import Recipe
from snugfit.training.options import TrainOptions
from snugfit.training.run import Data, Run
from snugfit.training.train import train
from snugfit.versions import versions

WARMUP = 5
RECIPES = (
    "plain",
    "tf32",
    "fp16",
    "bf16",
    "bf16 + adamw_fused",
    "fp16 + micro_batches(4)",
    "every_layer",
    "fp16 + every_layer + micro_batches(4)",
    "fp16 + every_layer + micro_batches(4) + adafactor",
    "fp16 + every_layer + micro_batches(4) + adamw_8bit",
)
"""The guide's experiments that run on one GPU without compiling."""


class Clock:
    """An observer that reads the wall clock at two borders."""

    def __init__(self, last: int) -> None:
        self._last, self._began, self.seconds = last, 0.0, 0.0
        self.core = QuietCore()

    def built(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.core.look()

    def step_begins(self, index: int) -> None: ...

    def phase(self, name: str) -> None: ...

    def step_ends(self, index: int) -> None:
        if index in (WARMUP - 1, self._last):
            torch.cuda.synchronize()
            now = time.perf_counter()
            self._began, self.seconds = now, (now - self._began) / (self._last + 1 - WARMUP)


def looped(job: Job, recipe: Recipe, loop: str, steps: int) -> float:
    clock = Clock(steps - 1)
    open_step(job, recipe.setup(), loop, torch.device("cuda")).run(steps, clock)
    return clock.seconds


def trained(job: Job, recipe: Recipe, steps: int) -> float:
    """Between the events of two steps, the last one not among them: an event may be told within the next
    step, and the last is not."""
    began, seconds = 0.0, 0.0
    core = QuietCore()

    def watch(event: dict[str, Any]) -> None:
        nonlocal began, seconds
        if event["event"] == "started":
            core.look()
        if event["event"] == "step" and event["step"] in (WARMUP, steps - 1):
            torch.cuda.synchronize()
            now = time.perf_counter()
            began, seconds = now, (now - began) / (steps - 1 - WARMUP)

    with tempfile.TemporaryDirectory() as folder:
        run_of(job, recipe, steps, Path(folder), watch, save_strategy="no")
    return seconds


def run_of(
    job: Job, recipe: Recipe, steps: int, folder: Path, watch: Callable[[Any], None], **options: Any
) -> None:
    data = Data(samples=SyntheticDataset(job, max(512, 4 * steps)), collate=collate)
    wanted = TrainOptions(max_steps=steps, lr_scheduler_type="constant", **options)
    run = Run(
        job=job, recipe=recipe, options=wanted, data=data, evaluation=None, folder=folder, weights=None,
        device=torch.device("cuda", 0),
    )  # fmt: skip
    train(run, watch=watch)


def cleared() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def row(job: Job, text: str, steps: int, turns: int) -> dict[str, Any]:
    recipe = Recipe.parse(text)
    loops: dict[str, Callable[[], float]] = {
        "bare": lambda: looped(job, recipe, "plain", steps),
        "snugfit": lambda: trained(job, recipe, steps),
        "trainer": lambda: looped(job, recipe, "trainer", steps),
    }
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(turns):
        for name, loop in loops.items():
            seconds[name].append(loop())
            cleared()
    best = {name: min(each) for name, each in seconds.items()}
    told = {
        "recipe": text,
        "clip": job.clip,
        "seconds": seconds,
        "overhead": best["snugfit"] / best["bare"] - 1,
        "faster_than_trainer": best["trainer"] / best["snugfit"],
    }
    print(f"{text:60} bare {best['bare'] * 1e3:7.2f} ms  overhead {told['overhead']:+.1%}"
          f"  trainer/snugfit {told['faster_than_trainer']:.2f}", flush=True)  # fmt: skip
    return told


def checkpoints(job: Job) -> list[dict[str, Any]]:
    """Two checkpoints of one run, 60 steps apart."""
    saved: list[dict[str, Any]] = []

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "saved":
            saved.append({key: event[key] for key in ("step", "bytes", "blocked_seconds", "seconds")})

    with tempfile.TemporaryDirectory() as folder:
        run_of(job, Recipe.parse("bf16"), 120, Path(folder), watch, save_steps=60)
    print(json.dumps(saved), flush=True)
    return saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--clip", type=float, default=1.0, help="the Trainer's default; 0 never clips")
    asked = parser.parse_intermixed_args()
    job = Job(
        model=Model.find("bert-large-uncased"), task="sequence-classification", batch_size=4,
        sequence_length=512, clip=asked.clip,
    )  # fmt: skip
    document: dict[str, Any] = {
        "what": "train overhead",
        "gpu": torch.cuda.get_device_name(),
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "job": job.to_json(),
        "steps": asked.steps - WARMUP,
        "rows": [],
    }
    for text in asked.recipes:
        document["rows"].append(row(job, text, asked.steps, asked.turns))
        write_document(asked.out, document)
    document["checkpoints"] = checkpoints(job)
    write_document(asked.out, document)


if __name__ == "__main__":
    main()
