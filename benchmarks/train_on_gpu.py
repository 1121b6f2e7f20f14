"""What training promises, on the GPU here: the same numbers after a kill, through each door, and when memory
runs out.

    python benchmarks/train_on_gpu.py OUT.json [--model bert-large-uncased] [--only resumed,doors,...]

    resumed     a run that is killed in step 8 and taken up from step 5: which of 12 steps have the same loss
                and norm, bit for bit, as those of a run that was not killed
    elsewhere   the same through `fit` and `accelerate`
    poisoned    a gradient that is infinite in step 6, which nobody waits for: what the run says, and whether
                the run that is taken up after it gives the numbers of one that met none
    doors       `train`, `fit` and `accelerate` over the same samples in the same order, fp32, no dropout:
                their losses, and the seconds of a step in each and in a plain Trainer
    samples     16 x 512 of which each takes 2 ms to be made, by no worker: the seconds of a step in a plain
                Trainer, through `fit` and through `accelerate`
    exhausted   32 x 512 under a recipe that does not fit into 20 GiB, through `train` and `fit`: the recipe
                that the run goes on with, its losses beside those of a run that had all memory

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

Seen = dict[int, tuple[float, float | None]]


class Killed(BaseException):
    """The end of a process, as far as one can have it in this one."""


def cleared() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def ran(
    job: Job, recipe: str, folder: Path, steps: int, *, kill: int | None = None, **options: Any
) -> tuple[Seen, list[dict[str, Any]]]:
    """Loss and norm of each step, and the other events."""
    seen: Seen = {}
    others: list[dict[str, Any]] = []

    def watch(event: dict[str, Any]) -> None:
        if event["event"] != "step":
            others.append(event)
            return
        seen[event["step"]] = event["loss"], event["norm"]
        if event["step"] == kill:
            raise Killed

    try:
        snugfit.train(
            job, recipe, SyntheticDataset(job, 512), collate=collate, output_dir=folder, device=DEVICE,
            max_steps=steps, weights="random", watch=watch, **options,
        )  # fmt: skip
    except Killed:
        pass
    except SnugfitError as said:
        others.append({"event": "error", "text": str(said)})
    cleared()
    return seen, others


def resumed(job: Job, folder: Path) -> list[dict[str, Any]]:
    rows = []
    for number, recipe in enumerate(RESUMED):
        whole, _ = ran(job, recipe, folder / f"{number}-whole", 12, save_strategy="no")
        killed, _ = ran(job, recipe, folder / f"{number}", 12, kill=8, save_steps=5)
        again, _ = ran(job, recipe, folder / f"{number}", 12, save_steps=5)
        same = [step for step in whole if (killed | again)[step] == whole[step]]
        rows.append({"recipe": recipe, "taken_up_from": min(again) - 1, "same": same})
        print(rows[-1], flush=True)
    return rows


class Killing(transformers.TrainerCallback):
    """Ends a Trainer's run after this step."""

    def __init__(self, step: int | None) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == self._step:
            raise Killed


def elsewhere(job: Job, folder: Path) -> dict[str, Any]:
    recipe = "bf16 + micro_batches(2)"

    def by_trainer(place: str, kill: int | None = None, resume: bool = False) -> Seen:
        trainer = trainer_of(
            job, folder / place, model_of(job), 12, logging_steps=1, save_strategy="steps", save_steps=5
        )
        trainer = snugfit.fit(trainer, recipe, watch=lambda event: None)
        trainer.add_callback(Killing(kill))
        with suppress(Killed):
            trainer.train(resume_from_checkpoint=True if resume else None)
        lines = [line for line in trainer.state.log_history if "loss" in line]
        return {line["step"]: (line["loss"], float(line["grad_norm"])) for line in lines}

    def by_hand(place: str, kill: int = 0, resume: bool = False) -> Seen:
        seen: Seen = {}
        hand(job, 12, recipe, folder=folder / place, kill=kill, resume=resume, seen=seen)
        return seen

    found = {}
    for name, door in {"fit": by_trainer, "accelerate": by_hand}.items():
        whole = door(f"{name}-whole")
        cleared()
        killed = door(name, kill=8)
        cleared()
        again = door(name, resume=True)
        cleared()
        found[name] = [step for step in whole if {**killed, **again}[step] == whole[step]]
    print(found, flush=True)
    return found


@contextmanager
def infinite_in(step: int) -> Iterator[None]:
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


def poisoned(job: Job, folder: Path) -> list[dict[str, Any]]:
    rows = []
    for number, clip in enumerate((None, 1.0)):
        clipped = replace(job, clip=clip)
        whole, _ = ran(clipped, "bf16", folder / f"{number}-whole", 10, save_strategy="no")
        with infinite_in(6):
            before, others = ran(clipped, "bf16", folder / f"{number}", 10, save_steps=3)
        after, _ = ran(clipped, "bf16", folder / f"{number}", 10, save_steps=3)
        rows.append({
            "clip": clip,
            "says": [event["text"] for event in others if event["event"] in ("warning", "error")],
            "taken_up_from": min(after) - 1,
            "same": [step for step in whole if {**before, **after}[step] == whole[step]],
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def model_of(job: Job) -> Any:
    torch.manual_seed(TrainOptions().seed)
    with torch.device(DEVICE):
        return instantiate(job, dtype="float32", attention="sdpa").train()


def trainer_of(job: Job, folder: Path, model: Any, steps: int, *, data: Any = None, **arguments: Any) -> Any:
    wanted: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": job.batch_size,
        "learning_rate": job.learning_rate, "logging_steps": 10_000, "save_strategy": "no",
        "report_to": "none", "lr_scheduler_type": "constant", "disable_tqdm": True, "use_cpu": not CUDA,
        "weight_decay": 0.0, "train_sampling_strategy": "sequential", "remove_unused_columns": False,
    }  # fmt: skip
    args = transformers.TrainingArguments(**{**wanted, **arguments})
    made = transformers.Trainer(
        model=model, args=args, data_collator=collate,
        train_dataset=SyntheticDataset(job, 512) if data is None else data,
    )  # fmt: skip
    made.remove_callback(transformers.PrinterCallback)
    return made


class Clock(transformers.TrainerCallback):
    """Reads the wall clock at the ends of two steps."""

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


def timed(trainer: Any, steps: int) -> float:
    clock = Clock(5, steps - 1)
    trainer.add_callback(clock)
    trainer.train()
    return clock.seconds


def doors(job: Job, folder: Path) -> dict[str, Any]:
    """The losses of eight steps through each door; then the seconds of a step in two turns."""
    own, _ = ran(
        job, "plain", folder / "own", 8, save_strategy="no", weight_decay=0.0, lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
    )  # fmt: skip
    fitted = snugfit.fit(
        trainer_of(job, folder / "fit", model_of(job), 8, logging_steps=1), "plain", watch=print
    )
    fitted.train()
    through_fit = [line["loss"] for line in fitted.state.log_history if "loss" in line]
    del fitted
    cleared()
    by_hand, _ = hand(job, 8)
    losses = {"train": [loss for loss, _ in own.values()], "fit": through_fit, "accelerate": by_hand}
    print(losses, flush=True)
    seconds: dict[str, list[float]] = {}
    for recipe, arguments in (("plain", {}), ("bf16", {"bf16": True})):
        for _ in range(2):
            trainer = trainer_of(job, folder / "plain", model_of(job), 25, **arguments)
            seconds.setdefault(f"trainer, {recipe}", []).append(timed(trainer, 25))
            del trainer
            cleared()
            trainer = snugfit.fit(
                trainer_of(job, folder / "timed", model_of(job), 25), recipe, watch=lambda event: None
            )
            seconds.setdefault(f"fit, {recipe}", []).append(timed(trainer, 25))
            del trainer
            cleared()
            seconds.setdefault(f"accelerate, {recipe}", []).append(hand(job, 25, recipe)[1])
    print({name: round(min(each) * 1e3, 1) for name, each in seconds.items()}, flush=True)
    return {"losses": losses, "seconds": seconds}


def hand(
    job: Job,
    steps: int,
    recipe: str = "plain",
    *,
    folder: Path | None = None,
    kill: int = 0,
    resume: bool = False,
    seen: Seen | None = None,
    data: Any = None,
) -> tuple[list[float], float]:
    """The losses, and the seconds of a step between the fifth and the last but one."""
    model = model_of(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate, weight_decay=0.0, foreach=True)
    loader: Any = torch.utils.data.DataLoader(
        SyntheticDataset(job, 512) if data is None else data,
        batch_size=job.batch_size,
        collate_fn=collate,
    )
    losses, began, seconds = [], 0.0, 0.0
    told: list[Any] = []
    with snugfit.accelerate(
        model, optimizer, loader, recipe, clip=job.clip, watch=told.append, output_dir=folder
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
    if seen is not None:
        seen.update({event["step"]: (event["loss"], event["norm"]) for event in told if "loss" in event})
    del run, model, optimizer
    cleared()
    return losses, seconds


class Slow(SyntheticDataset):
    """Samples that have to be tokenized, or read."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return super().__getitem__(index)


def samples(job: Job, folder: Path) -> dict[str, list[float]]:
    """Two turns."""
    seconds: dict[str, list[float]] = {}
    recipe, data = "bf16 + adamw_fused", Slow(job, 512)
    for _ in range(2):
        for name in ("trainer", "fit"):
            trainer = trainer_of(
                job, folder / name, model_of(job), 25, data=data, bf16=True, optim="adamw_torch_fused"
            )
            if name == "fit":
                trainer = snugfit.fit(trainer, recipe, watch=lambda event: None)
            seconds.setdefault(name, []).append(timed(trainer, 25))
            del trainer
            cleared()
        seconds.setdefault("accelerate", []).append(hand(job, 25, recipe, data=data)[1])
    print({name: round(min(each) * 1e3, 1) for name, each in seconds.items()}, flush=True)
    return seconds


def exhausted(job: Job, folder: Path) -> dict[str, Any]:
    whole, _ = ran(job, "bf16", folder / "whole", 6, save_strategy="no")
    with_less(LIMIT_BYTES)
    seen, others = ran(job, "bf16", folder / "train", 6, save_steps=3)
    told = [event for event in others if event["event"] in ("replanned", "error")]
    print(told, flush=True)
    fit_told: list[dict[str, Any]] = []
    trainer = trainer_of(job, folder / "fit", model_of(job), 6, bf16=True, logging_steps=1)
    trainer = snugfit.fit(trainer, "bf16", watch=fit_told.append)
    trainer.train()
    with_less(None)
    return {
        "limit_bytes": LIMIT_BYTES,
        "train": [{key: str(value) for key, value in event.items()} for event in told],
        "losses": {"all memory": list(whole.values()), "limited": list(seen.values())},
        "fit": [str(event.get("text")) for event in fit_told if event["event"] in ("replanned", "warning")],
        "fit_losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
    }


def with_less(limit: int | None) -> None:
    cleared()
    if CUDA:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else limit / whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="bert-large-uncased")
    parser.add_argument("--only", default="resumed,elsewhere,poisoned,doors,samples,exhausted")
    asked = parser.parse_args()
    model = Model.find(asked.model)
    job = Job(model=model, task="sequence-classification", batch_size=8, sequence_length=128, clip=1.0)  # type: ignore[arg-type]
    still = Model.from_config({**model.config, **NO_DROPOUT}, name=model.name, origin=model.origin)
    parts: dict[str, Callable[[Path], Any]] = {
        "resumed": lambda folder: resumed(job, folder),
        "elsewhere": lambda folder: elsewhere(job, folder),
        "poisoned": lambda folder: poisoned(job, folder),
        "doors": lambda folder: doors(replace(job, model=still, batch_size=4, sequence_length=512), folder),
        "samples": lambda folder: samples(replace(job, batch_size=16, sequence_length=512), folder),
        "exhausted": lambda folder: exhausted(replace(job, batch_size=32, sequence_length=512), folder),
    }
    document: dict[str, Any] = {
        "what": "training on the GPU",
        "gpu": torch.cuda.get_device_name() if CUDA else None,
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
    }
    for name in asked.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            document[name] = parts[name](Path(folder))
        write_document(asked.out, document)


if __name__ == "__main__":
    main()
