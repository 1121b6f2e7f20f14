"""Check the promises of training on a GPU: equal numbers after a kill, in each front-end, and out of memory.

    python lab/train_on_gpu.py OUT.json [--model bert-large-uncased] [--only resumed,doors,...]

    resumed     Kill a run in step 8 and resume it from step 5. Report those of 12 steps whose loss and norm
                equal an undisturbed run's, bit for bit.
    elsewhere   The same through `fit` and `accelerate`.
    poisoned    Make a gradient infinite in step 6, which no process waits for. Report the run's messages, and
                compare a run resumed after it with one without it.
    doors       Run the front-ends `train`, `fit` and `accelerate` over the same samples in the same order,
                in fp32 and without dropout. Report their losses, and the seconds of a step in each one and in
                a plain Trainer.
    samples     Train on 16 x 512 samples that take 2 ms each to make, without workers. Report the seconds of
                a step in a plain Trainer, through `fit` and through `accelerate`.
    exhausted   Run 32 x 512 under a recipe that does not fit into 20 GiB, through `train` and `fit`. Report
                the recipe of the continued run, and its losses beside those of a run with all memory.

The weights are random and the samples synthetic.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

import snugfit
from snugfit.documents import write_document
from snugfit.errors import SnugfitError
from snugfit.job.batch import SyntheticDataset
from snugfit.job.build import instantiate
from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.step.batches import collate
from snugfit.training.options import TrainOptions
from snugfit.training.run.loop import TrainingStep
from snugfit.versions import versions

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
LIMIT_BYTES = 20 << 30
RESUMED = ("bf16 + adamw_fused", "fp16 + micro_batches(2) + workers", "adamw_8bit")
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

Steps = dict[int, tuple[float, float | None]]
"""Loss and norm by step."""


class Killed(BaseException):
    """Exception in place of the process's death."""


def free_memory() -> None:
    """Collect garbage and empty the allocator's cache."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def run_training(
    job: Job, recipe: str, folder: Path, steps: int, *, kill: int | None = None, **options: Any
) -> tuple[Steps, list[dict[str, Any]]]:
    """Return loss and norm of each step, and the other events."""
    logged: Steps = {}
    events: list[dict[str, Any]] = []

    def watch(event: dict[str, Any]) -> None:
        if event["event"] != "step":
            events.append(event)
            return
        logged[event["step"]] = event["loss"], event["norm"]
        if event["step"] == kill:
            raise Killed

    try:
        snugfit.train(
            job, recipe, SyntheticDataset(job, 512), collate=collate, output_dir=folder, device=DEVICE,
            max_steps=steps, weights="random", watch=watch, **options,
        )  # fmt: skip
    except Killed:
        pass
    except SnugfitError as error:
        events.append({"event": "error", "text": str(error)})
    free_memory()
    return logged, events


def check_resume(job: Job, folder: Path) -> list[dict[str, Any]]:
    """Compare the steps of a killed and resumed run with those of a whole one, for each recipe."""
    rows = []
    for number, recipe in enumerate(RESUMED):
        whole, _ = run_training(job, recipe, folder / f"{number}-whole", 12, save_strategy="no")
        killed, _ = run_training(job, recipe, folder / f"{number}", 12, kill=8, save_steps=5)
        again, _ = run_training(job, recipe, folder / f"{number}", 12, save_steps=5)
        same = [step for step in whole if (killed | again)[step] == whole[step]]
        rows.append({"recipe": recipe, "taken_up_from": min(again) - 1, "same": same})
        print(rows[-1], flush=True)
    return rows


class Killing(transformers.TrainerCallback):
    """A callback that ends a Trainer's run after this step."""

    def __init__(self, step: int | None) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == self._step:
            raise Killed


def check_resume_in_front_ends(job: Job, folder: Path) -> dict[str, Any]:
    """Compare the steps of a killed and resumed run with those of a whole one, for `fit` and `accelerate`."""
    recipe = "bf16 + micro_batches(2)"

    def by_trainer(name: str, kill: int | None = None, resume: bool = False) -> Steps:
        trainer = trainer_of(
            job, folder / name, model_of(job), 12, logging_steps=1, save_strategy="steps", save_steps=5
        )
        trainer = snugfit.fit(trainer, recipe, watch=lambda event: None)
        trainer.add_callback(Killing(kill))
        with suppress(Killed):
            trainer.train(resume_from_checkpoint=True if resume else None)
        lines = [line for line in trainer.state.log_history if "loss" in line]
        return {line["step"]: (line["loss"], float(line["grad_norm"])) for line in lines}

    def by_custom_loop(name: str, kill: int = 0, resume: bool = False) -> Steps:
        logged: Steps = {}
        custom_loop(job, 12, recipe, folder=folder / name, kill=kill, resume=resume, logged=logged)
        return logged

    same = {}
    for name, run in {"fit": by_trainer, "accelerate": by_custom_loop}.items():
        whole = run(f"{name}-whole")
        free_memory()
        killed = run(name, kill=8)
        free_memory()
        again = run(name, resume=True)
        free_memory()
        same[name] = [step for step in whole if {**killed, **again}[step] == whole[step]]
    print(same, flush=True)
    return same


@contextmanager
def infinite_gradient(step: int) -> Iterator[None]:
    """Make one gradient infinite in that step of `train`."""
    plain = TrainingStep._accumulate

    def accumulate(self: TrainingStep, built: Any) -> Any:
        states = built.optimizer.state
        done = int(next(iter(states.values()))["step"]) if states else 0
        if done != step - 1:
            return plain(self, built)
        handle = next(built.model.parameters()).register_hook(lambda gradient: gradient * math.inf)
        try:
            return plain(self, built)
        finally:
            handle.remove()

    TrainingStep._accumulate = accumulate  # type: ignore[method-assign]
    try:
        yield
    finally:
        TrainingStep._accumulate = plain  # type: ignore[method-assign]


def check_infinite_gradient(job: Job, folder: Path) -> list[dict[str, Any]]:
    """Report an infinite gradient's messages, and the steps that equal those of a run without one."""
    rows = []
    for number, clip in enumerate((None, 1.0)):
        clipped = replace(job, clip=clip)
        whole, _ = run_training(clipped, "bf16", folder / f"{number}-whole", 10, save_strategy="no")
        with infinite_gradient(6):
            before, events = run_training(clipped, "bf16", folder / f"{number}", 10, save_steps=3)
        after, _ = run_training(clipped, "bf16", folder / f"{number}", 10, save_steps=3)
        rows.append({
            "clip": clip,
            "says": [event["text"] for event in events if event["event"] in ("warning", "error")],
            "taken_up_from": min(after) - 1,
            "same": [step for step in whole if {**before, **after}[step] == whole[step]],
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def model_of(job: Job) -> Any:
    """Return the job's model on the device, with the initial weights of `train`."""
    torch.manual_seed(TrainOptions().seed)
    with torch.device(DEVICE):
        return instantiate(job, dtype="float32", attention="sdpa").train()


def trainer_of(job: Job, folder: Path, model: Any, steps: int, *, data: Any = None, **arguments: Any) -> Any:
    defaults: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": job.batch_size,
        "learning_rate": job.learning_rate, "logging_steps": 10_000, "save_strategy": "no",
        "report_to": "none", "lr_scheduler_type": "constant", "disable_tqdm": True, "use_cpu": not CUDA,
        "weight_decay": 0.0, "train_sampling_strategy": "sequential", "remove_unused_columns": False,
    }  # fmt: skip
    args = transformers.TrainingArguments(**{**defaults, **arguments})
    trainer = transformers.Trainer(
        model=model, args=args, data_collator=collate,
        train_dataset=SyntheticDataset(job, 512) if data is None else data,
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


class Clock(transformers.TrainerCallback):
    """A callback that reads the wall clock at the ends of two steps."""

    def __init__(self, first: int, last: int) -> None:
        self._at, self.seconds = (first, last), 0.0
        self._began = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step in self._at:
            if CUDA:
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.seconds = (now - self._began) / (self._at[1] - self._at[0])
            self._began = now


def seconds_of_a_step(trainer: Any, steps: int) -> float:
    """Return the mean seconds from the fifth step to the last but one."""
    clock = Clock(5, steps - 1)
    trainer.add_callback(clock)
    trainer.train()
    return clock.seconds


def compare_front_ends(job: Job, folder: Path) -> dict[str, Any]:
    """Compare the losses of eight steps in each front-end, then the seconds of a step, twice by turns."""
    own, _ = run_training(
        job, "plain", folder / "own", 8, save_strategy="no", weight_decay=0.0, lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
    )  # fmt: skip
    fitted = snugfit.fit(
        trainer_of(job, folder / "fit", model_of(job), 8, logging_steps=1), "plain", watch=print
    )
    fitted.train()
    through_fit = [line["loss"] for line in fitted.state.log_history if "loss" in line]
    del fitted
    free_memory()
    by_custom_loop, _ = custom_loop(job, 8)
    losses = {"train": [loss for loss, _ in own.values()], "fit": through_fit, "accelerate": by_custom_loop}
    print(losses, flush=True)
    seconds: dict[str, list[float]] = {}
    for recipe, arguments in (("plain", {}), ("bf16", {"bf16": True})):
        for _ in range(2):
            trainer = trainer_of(job, folder / "plain", model_of(job), 25, **arguments)
            seconds.setdefault(f"trainer, {recipe}", []).append(seconds_of_a_step(trainer, 25))
            del trainer
            free_memory()
            trainer = snugfit.fit(
                trainer_of(job, folder / "timed", model_of(job), 25), recipe, watch=lambda event: None
            )
            seconds.setdefault(f"fit, {recipe}", []).append(seconds_of_a_step(trainer, 25))
            del trainer
            free_memory()
            seconds.setdefault(f"accelerate, {recipe}", []).append(custom_loop(job, 25, recipe)[1])
    print({name: round(min(taken) * 1e3, 1) for name, taken in seconds.items()}, flush=True)
    return {"losses": losses, "seconds": seconds}


def custom_loop(
    job: Job,
    steps: int,
    recipe: str = "plain",
    *,
    folder: Path | None = None,
    kill: int = 0,
    resume: bool = False,
    logged: Steps | None = None,
    data: Any = None,
) -> tuple[list[float], float]:
    """Return the losses through `snugfit.accelerate`, and the seconds of a step.

    The seconds are means from the fifth step to the last but one.
    """
    model = model_of(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate, weight_decay=0.0, foreach=True)
    loader: Any = torch.utils.data.DataLoader(
        SyntheticDataset(job, 512) if data is None else data,
        batch_size=job.batch_size,
        collate_fn=collate,
    )
    losses, began, seconds = [], 0.0, 0.0
    events: list[Any] = []
    with snugfit.accelerate(
        model, optimizer, loader, recipe, clip=job.clip, watch=events.append, output_dir=folder
    ) as run:
        if resume:
            run.resume()
        for batch in run:
            losses.append(run.step(batch))
            if folder is not None and run.steps == 5:
                run.save()
            if run.steps in (5, steps - 1):
                if CUDA:
                    torch.cuda.synchronize()
                now = time.perf_counter()
                began, seconds = now, (now - began) / (steps - 6)
            if run.steps in (steps, kill):
                break
    if logged is not None:
        logged.update({event["step"]: (event["loss"], event["norm"]) for event in events if "loss" in event})
    del run, model, optimizer
    free_memory()
    return losses, seconds


class Slow(SyntheticDataset):
    """Samples that take time, as with tokenization or reads."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return super().__getitem__(index)


def time_slow_samples(job: Job, folder: Path) -> dict[str, list[float]]:
    """Time a step over slow samples in a plain Trainer, `fit` and `accelerate`, twice by turns."""
    seconds: dict[str, list[float]] = {}
    recipe, data = "bf16 + adamw_fused", Slow(job, 512)
    for _ in range(2):
        for name in ("trainer", "fit"):
            trainer = trainer_of(
                job, folder / name, model_of(job), 25, data=data, bf16=True, optim="adamw_torch_fused"
            )
            if name == "fit":
                trainer = snugfit.fit(trainer, recipe, watch=lambda event: None)
            seconds.setdefault(name, []).append(seconds_of_a_step(trainer, 25))
            del trainer
            free_memory()
        seconds.setdefault("accelerate", []).append(custom_loop(job, 25, recipe, data=data)[1])
    print({name: round(min(taken) * 1e3, 1) for name, taken in seconds.items()}, flush=True)
    return seconds


def check_out_of_memory(job: Job, folder: Path) -> dict[str, Any]:
    """Report the continuation of `train` and `fit` out of memory, and their losses."""
    whole, _ = run_training(job, "bf16", folder / "whole", 6, save_strategy="no")
    limit_memory(LIMIT_BYTES)
    limited, events = run_training(job, "bf16", folder / "train", 6, save_steps=3)
    replans = [event for event in events if event["event"] in ("replanned", "error")]
    print(replans, flush=True)
    fit_events: list[dict[str, Any]] = []
    trainer = trainer_of(job, folder / "fit", model_of(job), 6, bf16=True, logging_steps=1)
    trainer = snugfit.fit(trainer, "bf16", watch=fit_events.append)
    trainer.train()
    limit_memory(None)
    return {
        "limit_bytes": LIMIT_BYTES,
        "train": [{key: str(value) for key, value in event.items()} for event in replans],
        "losses": {"all memory": list(whole.values()), "limited": list(limited.values())},
        "fit": [str(event.get("text")) for event in fit_events if event["event"] in ("replanned", "warning")],
        "fit_losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
    }


def limit_memory(limit: int | None) -> None:
    """Limit this process to so many bytes of the GPU, or lift the limit."""
    free_memory()
    if CUDA:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else limit / whole)


def main() -> None:
    """Run the parts of the command line, and write the file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="bert-large-uncased")
    parser.add_argument("--only", default="resumed,elsewhere,poisoned,doors,samples,exhausted")
    arguments = parser.parse_args()
    model = Model.find(arguments.model)
    job = Job(model=model, task="sequence-classification", batch_size=8, sequence_length=128, clip=1.0)  # type: ignore[arg-type]
    no_dropout = Model.from_config({**model.config, **NO_DROPOUT}, name=model.name, origin=model.origin)
    parts: dict[str, Callable[[Path], Any]] = {
        "resumed": lambda folder: check_resume(job, folder),
        "elsewhere": lambda folder: check_resume_in_front_ends(job, folder),
        "poisoned": lambda folder: check_infinite_gradient(job, folder),
        "doors": lambda folder: compare_front_ends(
            replace(job, model=no_dropout, batch_size=4, sequence_length=512), folder
        ),
        "samples": lambda folder: time_slow_samples(replace(job, batch_size=16, sequence_length=512), folder),
        "exhausted": lambda folder: check_out_of_memory(
            replace(job, batch_size=32, sequence_length=512), folder
        ),
    }
    document: dict[str, Any] = {
        "what": "training on the GPU",
        "gpu": torch.cuda.get_device_name() if CUDA else None,
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
    }
    for name in arguments.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            document[name] = parts[name](Path(folder))
        write_document(arguments.out, document)


if __name__ == "__main__":
    main()
