"""Measure `generate` on one GPU beside its prediction, for eight configurations.

    python lab/measure_generation.py OUT.json [--only NAME ...] [--steps N] [--device cuda:0]

Each configuration runs in a process of its own, with random weights. A row has predicted and measured bytes
at the peak of the whole process, allocated and reserved. It also has the seconds of prefill and decoding, as
means of the timed calls. Events of CUDA mark the phases, and the host waits at the end of a call only. With
`--device cpu` small versions run, whose measured bytes are left out: a check of the script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.step.open_step import open_step
from snugfit.step.step import Observer
from snugfit.techniques.recipe import Recipe

CONFIGURATIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt2, dynamic": ("gpt2", {"batch_size": 16, "sequence_length": 512}, {"new_tokens": 128}),
    "llama, dynamic": ("Llama-3.1-8B", {"batch_size": 8, "sequence_length": 1024}, {"new_tokens": 128}),
    "llama, static": (
        "Llama-3.1-8B",
        {"batch_size": 8, "sequence_length": 1024},
        {"new_tokens": 128, "cache": "static"},
    ),
    "llama, quantized": (
        "Llama-3.1-8B",
        {"batch_size": 8, "sequence_length": 1024},
        {"new_tokens": 128, "cache": "quantized"},
    ),
    "smollm, beams": (
        "SmolLM2-1.7B",
        {"batch_size": 4, "sequence_length": 512},
        {"new_tokens": 128, "beams": 4},
    ),
    "gemma, sliding window": (
        "gemma-2-2b",
        {"batch_size": 2, "sequence_length": 6000},
        {"new_tokens": 64},
    ),
    "t5, beams": (
        "flan-t5-large",
        {"batch_size": 8, "sequence_length": 512},
        {"new_tokens": 64, "beams": 4},
    ),
    "qwen, experts": ("Qwen3-30B-A3B", {"batch_size": 4, "sequence_length": 512}, {"new_tokens": 64}),
}
"""Model, fields of the job, and settings of the phase, by name."""


class Clock(Observer):
    """An observer that times prefill and decoding of each call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.moments: list[tuple[str, Any]] = []
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def phase(self, name: str) -> None:
        """Note the beginning of a phase; decode steps after the first belong to one phase."""
        if name in ("load", "prefill", "decode") and (not self.moments or self.moments[-1][0] != name):
            self._note(name)

    def step_ends(self, index: int) -> None:
        """Add the seconds of the phases of a call."""
        self._note("end")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for (name, begin), (_, end) in zip(self.moments, self.moments[1:]):
            seconds = begin.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - begin
            self.seconds[name].append(seconds)
        self.moments = []

    def _note(self, name: str) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.moments.append((name, event))
        else:
            import time

            self.moments.append((name, time.perf_counter()))


def job_of(name: str, *, small: bool) -> Job:
    model, sizes, settings = CONFIGURATIONS[name]
    if small:
        sizes, settings = {"batch_size": 1, "sequence_length": 16}, {**settings, "new_tokens": 8}
    found = Model.find("t5-small" if small and "t5" in name else "gpt2" if small else model, online=False)
    task = "seq2seq-lm" if "t5" in name else "causal-lm"
    return Job(model=found, task=task, phase="generate", phase_settings=settings, **sizes)  # type: ignore[arg-type]


def predicted(job: Job, gpu: str) -> dict[str, Any]:
    from snugfit.prediction.predict import predict

    prediction = predict(job, gpu=gpu)
    seconds = {one.phase: one.seconds for one in prediction.phase_results.passes}
    footprint = prediction.footprint
    return {
        "allocated_bytes": footprint.allocated_bytes,
        "reserved_bytes": footprint.reserved_bytes,
        "requested_bytes": footprint.requested_bytes,
        **{f"{phase}_seconds": value for phase, value in seconds.items()},
        "doubts": prediction.doubts,
    }


def measured(job: Job, device: torch.device, steps: int) -> dict[str, Any]:
    clock = Clock(device)
    step = open_step(job, Recipe().setup(), "plain", device)
    step.run(steps + 1, clock)
    # The first call loads kernels.
    means = {name: statistics.fmean(values[1:]) for name, values in clock.seconds.items()}
    row = {
        "prefill_seconds": means["load"] + means["prefill"],
        "decode_seconds": means["decode"],
        "each": dict(clock.seconds),
    }
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        row |= {
            "allocated_bytes": stats["allocated_bytes.all.peak"],
            "reserved_bytes": stats["reserved_bytes.all.peak"],
            "requested_bytes": stats["requested_bytes.all.peak"],
        }
    return row


def run_one(name: str, device: str, steps: int) -> dict[str, Any]:
    import transformers

    target = torch.device(device)
    job = job_of(name, small=target.type == "cpu")
    gpu = torch.cuda.get_device_name(target) if target.type == "cuda" else "h200"
    # The prediction comes first: it needs no memory of the GPU.
    row = {"name": name, "job": job.to_json(), "gpu": gpu, "predicted": predicted(job, gpu)}
    row["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    row["measured"] = measured(job, target, steps)
    return row | {"errors": _errors(row["predicted"], row["measured"])}


def _errors(foreseen: dict[str, Any], real: dict[str, Any]) -> dict[str, float]:
    """Return predicted / measured - 1 for each figure that both have."""
    return {
        key: foreseen[key] / real[key] - 1
        for key in foreseen
        if isinstance(foreseen[key], int | float) and real.get(key)
    }


def main() -> int:
    """Run all configurations, each in a process, and write the rows after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", action="append", choices=list(CONFIGURATIONS))
    parser.add_argument("--steps", type=int, default=3, help="timed calls")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--alone", action="store_true", help="run the one configuration in this process")
    given = parser.parse_args()
    if given.alone:
        row = run_one(given.only[0], given.device, given.steps)
        given.out.write_text(json.dumps(row, indent=1, default=str) + "\n")
        return 0
    rows: list[Any] = []
    for name in given.only or CONFIGURATIONS:
        part = given.out.with_suffix(".part.json")
        part.unlink(missing_ok=True)
        words = ["--only", name, "--alone", "--device", given.device, "--steps", str(given.steps)]
        ended = subprocess.run([sys.executable, __file__, str(part), *words], check=False)
        rows.append(
            json.loads(part.read_text()) if part.exists() else {"name": name, "exit": ended.returncode}
        )
        part.unlink(missing_ok=True)
        given.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
