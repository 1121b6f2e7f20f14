"""Measure the overhead of training over the bare loop, beside the HF Trainer, in one process.

    python lab/train_overhead.py OUT.json [--steps 40] [--turns 4] [--clip 1.0] [--loops bare,fit]
                                        [--no-checkpoints] [RECIPE ...]

The job is BERT-large, 4 x 512, as in Hugging Face's single-GPU guide, under the guide's recipes. For each
recipe these loops take the same number of steps over the same synthetic samples, by turns, in one process.

    bare        The plain loop, without checks of loss or gradients, schedule, journal or checkpoint.
    snugfit     `training/run/session.py` with all of that but checkpoints. They are timed below.
    trainer     The installed transformers.Trainer with the flags of the recipe (`step/trainer_loop.py`).
    fit         The Trainer with the recipe, by `snugfit.fit`.
    accelerate  A custom loop with the recipe, by `snugfit.accelerate`.

Seconds are those of the wall clock between two steps, after synchronising the device at both. The fastest
turn counts, because other guests of a rented host can only slow one down.

Checkpoints follow: the wait of the training for one of BERT-large with AdamW, and the duration of its write
beside the training. `--no-checkpoints` leaves that out.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import snugfit
from snugfit.documents import write_document
from snugfit.features.loops.custom_loop import run as custom_loop
from snugfit.features.loops.trainer import step_timer
from snugfit.job.batch import SyntheticDataset
from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.measurement.quiet_core import QuietCore
from snugfit.step.batches import collate, dataset
from snugfit.step.build import build_model, build_optimizer
from snugfit.step.open_step import open_step
from snugfit.techniques.recipe import Recipe
from snugfit.training.options import TrainOptions
from snugfit.training.predicted import predict_nothing
from snugfit.training.run.run import Data, Run
from snugfit.training.run.train import train
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


Watch = Callable[[dict[str, Any]], None]


class Clock:
    """An observer that reads the wall clock at two step boundaries."""

    def __init__(self, last: int) -> None:
        self._last, self._began, self.seconds = last, 0.0, 0.0
        self.core = QuietCore()

    def build_ends(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.core.rebalance()

    def step_begins(self, index: int) -> None: ...

    def phase(self, name: str) -> None: ...

    def step_ends(self, index: int) -> None:
        self.core.rebalance()
        if index in (WARMUP - 1, self._last):
            torch.cuda.synchronize()
            now = time.perf_counter()
            self._began, self.seconds = now, (now - self._began) / (self._last + 1 - WARMUP)


def run_loop(job: Job, recipe: Recipe, loop: str, steps: int) -> float:
    clock = Clock(steps - 1)
    open_step(job, recipe.setup(), loop, torch.device("cuda")).run(steps, clock)
    return clock.seconds


def run_snugfit(job: Job, recipe: Recipe, steps: int) -> float:
    """Return the seconds of a step between the events of two steps.

    The last step is not one of them, because only its event cannot come within the next step.
    """
    began, seconds = 0.0, 0.0
    core = QuietCore()

    def watch(event: dict[str, Any]) -> None:
        nonlocal began, seconds
        core.rebalance()
        if event["event"] == "step" and event["step"] in (WARMUP, steps - 1):
            torch.cuda.synchronize()
            now = time.perf_counter()
            began, seconds = now, (now - began) / (steps - 1 - WARMUP)

    with tempfile.TemporaryDirectory() as folder:
        train_with(job, recipe, steps, Path(folder), watch, save_strategy="no")
    return seconds


def train_with(job: Job, recipe: Recipe, steps: int, folder: Path, watch: Watch, **options: Any) -> None:
    data = Data(samples=SyntheticDataset(job, max(512, 4 * steps)), collate=collate)
    all_options = TrainOptions(max_steps=steps, lr_scheduler_type="constant", **options)
    run = Run(
        job=job, recipe=recipe, options=all_options, data=data, evaluation=None, folder=folder, weights=None,
        device=torch.device("cuda", 0),
    )  # fmt: skip
    train(run, watch=watch)


class StepEnds(transformers.TrainerCallback):
    """A callback that passes a Trainer's steps to a clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._clock.build_ends(more["model"], None)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._clock.step_ends(state.global_step - 1)


def run_fit(job: Job, recipe: Recipe, steps: int, watch: Watch = lambda event: None, **options: Any) -> float:
    clock, plain, device = Clock(steps - 1), Recipe.parse("plain").setup(), torch.device("cuda")
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=job.batch_size,
            learning_rate=job.learning_rate, lr_scheduler_type="constant", max_grad_norm=job.clip or 0.0,
            report_to="none", disable_tqdm=True, **{"save_strategy": "no", **options},
        )  # fmt: skip
        trainer = transformers.Trainer(
            build_model(job, plain, device), args, transformers.default_data_collator,
            dataset(job, plain, device, steps), callbacks=[StepEnds(clock)],
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        snugfit.fit(trainer, recipe, watch=watch).train()
    return clock.seconds


def run_accelerate(job: Job, recipe: Recipe, steps: int) -> float:
    clock, plain, device = Clock(steps - 1), Recipe.parse("plain").setup(), torch.device("cuda")
    model = build_model(job, plain, device)
    loader: Any = torch.utils.data.DataLoader(
        dataset(job, plain, device, steps),  # type: ignore[arg-type]
        batch_size=job.batch_size,
        collate_fn=collate,
    )
    clock.build_ends(model, None)
    optimizer = build_optimizer(job, plain, model)
    with (
        tempfile.TemporaryDirectory() as folder,
        snugfit.accelerate(
            model, optimizer, loader, recipe, clip=job.clip, output_dir=folder, watch=lambda event: None
        ) as run,
    ):
        for batch in run:
            run.step(batch)
            clock.step_ends(run.steps - 1)
            if run.steps == steps:
                break
    return clock.seconds


LOOPS: dict[str, Callable[[Job, Recipe, int], float]] = {
    "bare": lambda job, recipe, steps: run_loop(job, recipe, "plain", steps),
    "snugfit": run_snugfit,
    "trainer": lambda job, recipe, steps: run_loop(job, recipe, "trainer", steps),
    "fit": run_fit,
    "accelerate": run_accelerate,
}


def free_memory() -> None:
    """Collect garbage and empty the allocator's cache."""
    gc.collect()
    torch.cuda.empty_cache()


def measure_recipe(job: Job, text: str, loops: Sequence[str], steps: int, turns: int) -> dict[str, Any]:
    recipe = Recipe.parse(text)
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(turns):
        for name in loops:
            seconds[name].append(LOOPS[name](job, recipe, steps))
            free_memory()
    best = {name: min(taken) for name, taken in seconds.items()}
    shown = (f"{name} {fastest * 1e3:.2f} ms" for name, fastest in best.items())
    print(f"{text:40} " + "  ".join(shown), flush=True)
    row: dict[str, Any] = {"recipe": text, "clip": job.clip, "seconds": seconds}
    for beside in {"bare", "trainer"} & {*loops}:
        row[f"over_{beside}"] = {name: best[name] / best[beside] - 1 for name in loops if name != beside}
    return row


def checkpoints(job: Job) -> dict[str, list[dict[str, Any]]]:
    """Time two checkpoints of one run, 60 steps apart."""
    saved: dict[str, list[dict[str, Any]]] = {"snugfit": [], "fit": []}
    keys = ("step", "bytes", "blocked_seconds", "seconds")

    def saves_of(loop: str) -> Watch:
        def watch(event: dict[str, Any]) -> None:
            if event["event"] == "saved":
                saved[loop].append({key: event[key] for key in keys})

        return watch

    recipe = Recipe.parse("bf16")
    with tempfile.TemporaryDirectory() as folder:
        train_with(job, recipe, 120, Path(folder), saves_of("snugfit"), save_steps=60)
    free_memory()
    run_fit(job, recipe, 120, saves_of("fit"), save_strategy="steps", save_steps=60)
    print(json.dumps(saved), flush=True)
    return saved


def main() -> None:
    """Measure the recipes of the command line, and write the file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--clip", type=float, default=1.0, help="the Trainer's default; 0 never clips")
    parser.add_argument("--loops", default="bare,snugfit,trainer", help=f"of {', '.join(LOOPS)}")
    parser.add_argument("--no-checkpoints", action="store_true")
    arguments = parser.parse_intermixed_args()
    for front_end in (custom_loop, step_timer):  # a prediction takes seconds outside the steps
        front_end.run_predictor = lambda device: predict_nothing
    job = Job(
        model=Model.find("bert-large-uncased"), task="sequence-classification", batch_size=4,
        sequence_length=512, clip=arguments.clip,
    )  # fmt: skip
    document: dict[str, Any] = {
        "what": "train overhead",
        "gpu": torch.cuda.get_device_name(),
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "job": job.to_json(),
        "steps": arguments.steps - WARMUP,
        "rows": [],
    }
    for text in arguments.recipes:
        document["rows"].append(
            measure_recipe(job, text, arguments.loops.split(","), arguments.steps, arguments.turns)
        )
        write_document(arguments.out, document)
    if not arguments.no_checkpoints:
        document["checkpoints"] = checkpoints(job)
        write_document(arguments.out, document)


if __name__ == "__main__":
    main()
