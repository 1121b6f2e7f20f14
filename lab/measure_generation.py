"""Measure `generate` on one GPU beside its prediction, for eight configurations, and a checkpoint's load.

    python lab/measure_generation.py OUT.json [--only NAME ...] [--steps N] [--device cuda:0]

Each configuration runs in a process of its own, with random weights. A row has predicted and measured bytes
at the peak of the whole process, allocated and reserved. It also has the seconds of prefill and decoding, as
means of the timed calls. Events of CUDA mark the phases, and the host waits at the end of a call only. With
`--device cpu` small versions run, whose measured bytes are left out: a check of the script.

The configuration `LOADED` writes a checkpoint to a temporary folder and loads it with a device map. Then it
loads it in 4 and 8 bits, if bitsandbytes is installed. The files are in the page cache.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
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

LOADED = "smollm, loaded"
CONFIGURATIONS[LOADED] = ("SmolLM2-1.7B", {"batch_size": 1, "sequence_length": 16}, {"new_tokens": 2})


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


def predicted_loading(job: Job, gpu: str) -> dict[str, Any]:
    from snugfit.prediction.predict import predict

    results = predict(job, gpu=gpu).phase_results.loading
    return {
        f"{one.weights}, {key}": getattr(one, key)
        for one in results
        for key in ("allocated_bytes", "reserved_bytes", "read_bytes", "copy_seconds")
    }


def measured_loading(job: Job, device: torch.device) -> dict[str, Any]:
    from snugfit.step.build import build_model

    model: Any = build_model(job, Recipe().setup(), device)
    kind, row = type(model), {}
    variants = (0, 4, 8) if importlib.util.find_spec("bitsandbytes") else (0,)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size="1GB")
        files = Path(folder).glob("*.safetensors")
        row["as saved, file_bytes"] = sum(file.stat().st_size for file in files)
        del model
        for bits in variants:
            name = f"{bits} bits" if bits else "as saved"
            row |= {f"{name}, {key}": value for key, value in _load(kind, folder, bits, job, device).items()}
    return row


def _load(kind: Any, folder: str, bits: int, job: Job, device: torch.device) -> dict[str, Any]:
    """Load a checkpoint, and return the peaks of the allocator and the seconds of the whole call."""
    from transformers import BitsAndBytesConfig

    how: dict[str, Any] = {"dtype": getattr(torch, job.dtype), "device_map": {"": device}}
    if bits:
        how["quantization_config"] = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    gc.collect()
    on_gpu = device.type == "cuda"
    if on_gpu:
        # The warm-up is smaller if the allocator has cached memory.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.perf_counter()
    model = kind.from_pretrained(folder, **how)
    if on_gpu:
        torch.cuda.synchronize(device)
    row: dict[str, Any] = {"seconds": time.perf_counter() - begin}
    if on_gpu:
        stats = torch.cuda.memory_stats(device)
        row |= {f"{key}_bytes": stats[f"{key}_bytes.all.peak"] for key in ("allocated", "reserved")}
    del model
    return row


def run_one(name: str, device: str, steps: int) -> dict[str, Any]:
    import transformers

    target = torch.device(device)
    job = job_of(name, small=target.type == "cpu")
    gpu = torch.cuda.get_device_name(target) if target.type == "cuda" else "h200"
    # The prediction comes first: it needs no memory of the GPU.
    row = {"name": name, "job": job.to_json(), "gpu": gpu}
    is_load = name == LOADED
    row["predicted"] = predicted_loading(job, gpu) if is_load else predicted(job, gpu)
    row["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    row["measured"] = measured_loading(job, target) if is_load else measured(job, target, steps)
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
