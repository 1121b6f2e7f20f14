"""Measure steps with LoRA adapters on one GPU, each recipe in a process of its own, and profile some of them.

    python lab/lora_steps.py OUT.json RECIPE ... [--model NAME] [--batch 4] [--length 2048] [--profile WORD]
        [--warmup 5] [--timed 10] [--clip NORM] [--gpu NAME]

A process builds the model with random weights and runs 5 steps, whose losses are compared, and 10 timed
steps. With `--gpu` each row has the prediction for that GPU. A matrix product of fixed size is timed before
and after them, so that a slower clock is visible. One more step of the recipes that contain WORD runs under
`torch.profiler`. `nvidia-smi` is read during the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.step.applier import process_environment
from snugfit.step.open_step import open_step
from snugfit.step.step import Observer
from snugfit.techniques.recipe import Recipe

SMI = "clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active"
CUDA = torch.cuda.is_available()


def product_flops() -> float:
    """Return the FLOP/s of a large product in bfloat16, the median of five."""
    size = 8192 if CUDA else 256
    one = torch.randn(size, size, device="cuda" if CUDA else "cpu", dtype=torch.bfloat16)
    seconds = []
    for _ in range(6):
        synchronize()
        begin = time.perf_counter()
        for _ in range(10):
            one @ one
        synchronize()
        seconds.append((time.perf_counter() - begin) / 10)
    return 2 * size**3 / sorted(seconds[1:])[2]


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


class Clock(Observer):
    """An observer that times steps after `warmup` ones, and profiles one more."""

    def __init__(self, warmup: int, timed: int, profiled: bool) -> None:
        self.warmup, self.steps, self.profiled = warmup, warmup + timed, profiled
        self.begin = self.end = self.used = 0.0
        self.kernels: list[dict[str, Any]] = []
        self.smi: list[str] = []
        self.profile: Any = None

    def step_begins(self, index: int) -> None:
        if index == self.steps and self.profiled:
            self.profile = torch.profiler.profile()
            self.profile.start()

    def step_ends(self, index: int) -> None:
        if index == self.warmup - 1:
            synchronize()
            threading.Thread(target=self.read_smi, daemon=True).start()
            self.begin = time.perf_counter()
        if index == self.steps - 1:
            synchronize()
            self.end = time.perf_counter()
            if CUDA:
                free, total = torch.cuda.mem_get_info()
                self.used = total - free
        if self.profile is not None:
            synchronize()
            self.profile.stop()
            rows = sorted(self.profile.key_averages(), key=lambda row: -row.self_device_time_total)
            self.kernels = [
                {"name": row.key[:160], "count": row.count, "ms": row.self_device_time_total / 1000}
                for row in rows[:60]
                if row.self_device_time_total
            ]

    def read_smi(self) -> None:
        while not self.end and CUDA:
            command = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader,nounits"]
            self.smi.append(
                subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
            )
            time.sleep(0.5)


def predicted(job: Job, recipe: str, gpu: str) -> dict[str, Any]:
    """Return the predicted bytes and milliseconds of this recipe on a GPU of the table."""
    from snugfit.prediction.predict import predict

    prediction = predict(job, recipe, gpu=gpu)
    footprint, timing = prediction.footprint, prediction.timing
    return {
        "requested": footprint.requested_bytes,
        "reserved": footprint.reserved_bytes,
        "nvml": footprint.nvml_bytes,
        "ms": timing.step_seconds * 1000 if timing else None,
    }


def row(job: Job, recipe: str, given: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds, bytes and losses of this recipe, measured in this process."""
    profiled = given.profile in recipe
    parsed = Recipe.parse(recipe)
    parsed.check(job)
    device = torch.device("cuda", 0) if CUDA else torch.device("cpu")
    setup = parsed.setup()
    flops = [product_flops()]
    clock = Clock(given.warmup, given.timed, profiled)
    begin = time.perf_counter()
    step = open_step(job, setup, "plain", device, keep_losses=True)
    torch.manual_seed(0)
    losses = step.run(given.warmup + given.timed + profiled, clock)
    whole = time.perf_counter() - begin
    flops.append(product_flops())
    seconds = (clock.end - clock.begin) / given.timed
    stats = torch.cuda.memory_stats() if CUDA else {}
    foreseen = {"predicted": predicted(job, recipe, given.gpu)} if given.gpu else {}
    return {
        "recipe": recipe,
        "batch": job.batch_size,
        "length": job.sequence_length,
        "clip": job.clip,
        **foreseen,
        "ms": seconds * 1000,
        "tokens_per_second": job.batch_size * job.sequence_length / seconds,
        "requested": stats.get("requested_bytes.all.peak"),
        "allocated": stats.get("allocated_bytes.all.peak"),
        "reserved": stats.get("reserved_bytes.all.peak"),
        "nvml_used": clock.used,
        "losses": losses,
        "product_tflops": [one / 1e12 for one in flops],
        "smi": clock.smi,
        "run_seconds": whole,
        "kernels": clock.kernels,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--profile", default="captured")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--timed", type=int, default=10)
    parser.add_argument("--clip", type=float)
    parser.add_argument("--gpu", default="")
    parser.add_argument("--alone", action="store_true")
    given = parser.parse_args()
    if given.alone:
        config = json.loads(given.model) if given.model[:1] == "{" else None
        model = Model.from_config(config, name="small") if config else Model.find(given.model)
        job = Job(model=model, task=Task.CAUSAL_LM, batch_size=given.batch, sequence_length=given.length,
                  clip=given.clip)  # fmt: skip
        [recipe] = given.recipes
        given.out.write_text(json.dumps(row(job, recipe, given)), encoding="utf-8")
        return
    rows = []
    for recipe in given.recipes:
        part = given.out.with_suffix(".part")
        part.unlink(missing_ok=True)
        options = [str(part), recipe, "--alone", "--model", given.model, "--profile", given.profile]
        numbers = {
            name: getattr(given, name) for name in ("batch", "length", "warmup", "timed", "clip", "gpu")
        }
        more = [f"--{name}={value}" for name, value in numbers.items() if value not in (None, "")]
        # Expandable segments are switched on by a variable of the process.
        environment = process_environment(Recipe.parse(recipe).setup(), os.environ)
        done = subprocess.run([sys.executable, __file__, *options, *more], capture_output=True, text=True,
                              check=False, env=environment)  # fmt: skip
        found = json.loads(part.read_text()) if part.exists() else {"error": done.stderr[-3000:]}
        rows.append({**found, "recipe": recipe})
        given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(json.dumps({key: rows[-1].get(key) for key in ("recipe", "ms", "tokens_per_second", "allocated",
              "reserved", "nvml_used", "losses", "product_tflops", "error")}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
