"""Measure `generate` on one GPU beside its prediction, for eight models, and a checkpoint's load.

    python lab/measure_generation.py OUT.json [--only NAME ...] [--steps N] [--device cuda:0]
    python lab/measure_generation.py OUT.json --captured
    python lab/measure_generation.py OUT.json --beside RECORDED.json

All predictions come first, in parallel, and are written before a GPU runs. Then each configuration runs in a
process of its own, with random weights. A row has predicted and measured bytes at the peak of the whole
process, allocated and reserved. It also has the seconds of prefill and decoding, as means of the timed calls.
Events of CUDA mark the phases, and the host waits at the end of a call only. `launch_seconds` are those of
one small kernel, before and after the calls. They show the speed of the host.

With `--beside`, the configurations of a recorded file are predicted again beside its measured figures.

A configuration that this transformers does not support has the reason in place of figures. With `--device
cpu` small versions run, whose measured bytes are left out: a check of the script.

Configurations of `RECIPES` are compared with the plain recipe after the same seed, in the same dtype: their
tokens, and their logits. `--captured` measures decode steps as CUDA graphs alone, beside eager ones with the
same cache.

The configuration `LOADED` writes a checkpoint to a temporary folder and loads it with a device map. Then it
loads it in 4 bits, if bitsandbytes is installed. The files are in the page cache.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

# Forked processes use the GPU, so this one must not start CUDA to count devices.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import torch

from snugfit.errors import SnugfitError
from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.step.open_step import open_step
from snugfit.step.step import Observer
from snugfit.techniques.recipe import Recipe

LLAMA = {"batch_size": 8, "sequence_length": 1024}

CONFIGURATIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt2, dynamic": ("gpt2", {"batch_size": 16, "sequence_length": 512}, {"new_tokens": 128}),
    "llama, dynamic": ("Llama-3.1-8B", LLAMA, {"new_tokens": 128}),
    "llama, static": ("Llama-3.1-8B", LLAMA, {"new_tokens": 128, "cache": "static"}),
    "llama, quantized": ("Llama-3.1-8B", LLAMA, {"new_tokens": 128, "cache": "quantized"}),
    "llama, offloaded": ("Llama-3.1-8B", LLAMA, {"new_tokens": 64, "cache": "offloaded"}),
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
    "mistral, window": (
        "mistralai/Mistral-7B-v0.1",
        {"batch_size": 2, "sequence_length": 4064},
        {"new_tokens": 64},
    ),
    "llama, sampled": ("Llama-3.1-8B", LLAMA, {"new_tokens": 64, "sample": True, "top_p": 0.9}),
    "qwen, small": ("Qwen3-0.6B", {"batch_size": 16, "sequence_length": 256}, {"new_tokens": 128}),
}
"""Model, fields of the job, and settings of the phase, by name."""

STATIC = {"new_tokens": 128, "cache": "static"}
RECIPES: dict[str, str] = {}
"""Recipe by name of a configuration; the others have the plain one."""

for _name, _model, _sizes in (
    ("gpt2", "gpt2", {"batch_size": 16, "sequence_length": 512}),
    ("qwen", "Qwen3-0.6B", {"batch_size": 16, "sequence_length": 256}),
    ("llama", "Llama-3.1-8B", LLAMA),
):
    CONFIGURATIONS[f"{_name}, static"] = (_model, _sizes, STATIC)
    CONFIGURATIONS[f"{_name}, captured"] = (_model, _sizes, STATIC)
    RECIPES[f"{_name}, captured"] = "captured"

LOADED = "smollm, loaded"
CONFIGURATIONS[LOADED] = ("SmolLM2-1.7B", {"batch_size": 1, "sequence_length": 16}, {"new_tokens": 2})

SELECTED = "rows of a cache, selected"
"""Name of the row with the seconds of a beam search's copies of a cache."""

SEED = 1234

PAGE = 4096
"""Bytes of a page of host memory."""

LAUNCHES = 2000
"""Small kernels whose launches are timed."""


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


def recipe_of(name: str) -> Recipe:
    return Recipe.parse(RECIPES.get(name, "plain"))


def predicted(job: Job, recipe: Recipe, gpu: str) -> dict[str, Any]:
    from snugfit.prediction.predict import predict

    prediction = predict(job, recipe, gpu=gpu)
    seconds = {one.phase: one.seconds for one in prediction.phase_results.passes}
    footprint = prediction.footprint
    return {
        "allocated_bytes": footprint.allocated_bytes,
        "reserved_bytes": footprint.reserved_bytes,
        "requested_bytes": footprint.requested_bytes,
        "page_locked_bytes": footprint.pinned_bytes,
        "context_bytes": footprint.context_bytes,
        **{f"{phase}_seconds": value for phase, value in seconds.items()},
        "doubts": prediction.doubts,
    }


def launch_seconds(device: torch.device) -> float:
    """Return the seconds in which the host launches one small kernel."""
    tensor = torch.zeros(16, device=device)
    for _ in range(LAUNCHES // 10):
        tensor.add_(1)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(LAUNCHES):
        tensor.add_(1)
    return (time.perf_counter() - begin) / LAUNCHES


def measured(job: Job, recipe: Recipe, device: torch.device, steps: int) -> dict[str, Any]:
    clock, launches = Clock(device), [launch_seconds(device)]
    torch.manual_seed(SEED)
    step: Any = open_step(job, recipe.setup(), "plain", device)
    step.run(steps + 1, clock)
    # The first call loads kernels.
    means = {name: statistics.fmean(values[1:]) for name, values in clock.seconds.items()}
    row = {
        "prefill_seconds": means["load"] + means["prefill"],
        "decode_seconds": means["decode"],
        "each": dict(clock.seconds),
    }
    launches.append(launch_seconds(device))
    row["launch_seconds"] = launches
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        row |= {
            "allocated_bytes": stats["allocated_bytes.all.peak"],
            "reserved_bytes": stats["reserved_bytes.all.peak"],
            "requested_bytes": stats["requested_bytes.all.peak"],
            "page_locked_bytes": torch.cuda.host_memory_stats().get("allocated_bytes.peak"),
        }
    return row | (agreement(step, device) if recipe != Recipe() else {})


def agreement(step: Any, device: torch.device) -> dict[str, Any]:
    """Return the comparison of a built step's outputs with those of the plain recipe in the same dtype."""
    torch.manual_seed(SEED)
    ours = step.outputs()
    row = {"used_bytes": used_bytes(device), "results": step.results}
    step.model = None
    gc.collect()
    torch.manual_seed(SEED)
    plain: Any = open_step(step.job, Recipe().setup(), "plain", device)
    plain.run(1, Observer())
    torch.manual_seed(SEED)
    eager = plain.outputs()
    return row | {
        "ids_equal": bool((ours.ids == eager.ids).all()),
        "largest_error": float((ours.values - eager.values).abs().max()),
    }


def used_bytes(device: torch.device) -> int | None:
    """Return the used bytes of the whole GPU, of which a lone process has all but the driver's own."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free


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
    variants = (0, 4) if importlib.util.find_spec("bitsandbytes") else (0,)
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


def predict_one(name: str, small: bool, gpu: str) -> dict[str, Any]:
    """Return the row of a configuration with its prediction, or with the reason of a refusal."""
    begin = time.perf_counter()
    try:
        job = job_of(name, small=small)
        row = {"name": name, "job": job.to_json(), "gpu": gpu}
        row["predicted"] = (
            predicted_loading(job, gpu) if name == LOADED else predicted(job, recipe_of(name), gpu)
        )
    except SnugfitError as error:
        return {"name": name, "refused": str(error)}
    return row | {"predicted_in_seconds": time.perf_counter() - begin}


def measure_one(name: str, device: str, steps: int) -> dict[str, Any]:
    """Return the measured figures of a configuration, with the versions of its libraries."""
    target = torch.device(device)
    job = job_of(name, small=target.type == "cpu")
    begin = time.perf_counter()
    found = measured_loading(job, target) if name == LOADED else measured(job, recipe_of(name), target, steps)
    return {
        "versions": _versions(),
        "measured": found,
        "measured_in_seconds": time.perf_counter() - begin,
    }


def copy_seconds(device: torch.device) -> dict[str, float]:
    """Return the seconds in which a device selects rows of a cache, by dtype, rows and the index's dtype."""
    seconds = {}
    for dtype in (torch.bfloat16, torch.float32):
        for rows in (16, 32):
            cache = torch.zeros((rows, 16, 512, 64), dtype=dtype, device=device)
            for of_index in (torch.int32, torch.int64):
                index = torch.arange(rows, device=device, dtype=of_index)
                for repeats in (3, 20):
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
                    begin = time.perf_counter()
                    for _ in range(repeats):
                        cache.index_select(0, index)
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
                    took = (time.perf_counter() - begin) / repeats
                seconds[f"{cache.nbytes} bytes, {dtype}, {rows} rows by {of_index}"] = took
    return seconds


def name_of(device: str) -> str:
    """Return the name of the GPU, or of the one whose rates a check on the CPU uses."""
    return torch.cuda.get_device_name(device) if device != "cpu" else "h200"


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function in a process of its own, or the error that it raised, as text."""
    # A fork has the libraries already, and no CUDA yet.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}


def _errors(foreseen: dict[str, Any], real: dict[str, Any]) -> dict[str, float]:
    """Return predicted / measured - 1 for each figure that both have. Bytes below a page are left out."""
    return {
        key: foreseen[key] / real[key] - 1
        for key in foreseen
        if isinstance(foreseen[key], int | float)
        and real.get(key)
        # `generate` reads a flag of one byte per sequence through page-locked memory.
        and not (key.endswith("_bytes") and real[key] < PAGE)
    }


def main() -> int:
    """Predict all configurations, then run each in a process, and write the rows after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", action="append", choices=list(CONFIGURATIONS))
    parser.add_argument("--captured", action="store_true", help="decode steps as CUDA graphs, and eager ones")
    parser.add_argument("--steps", type=int, default=2, help="timed calls")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--beside", type=Path, help="a file with measured figures")
    given = parser.parse_args()
    recorded = [row for row in _read(given.beside) if "measured" in row]
    given.only = given.only or [name for name in CONFIGURATIONS if given.captured and _is_static(name)]
    names = [row["name"] for row in recorded] or given.only or list(CONFIGURATIONS)
    is_small = given.device == "cpu" and not recorded
    gpu = recorded[0]["gpu"] if recorded else alone(name_of, given.device)
    if isinstance(gpu, dict):
        parser.error(f"--device {given.device}: {gpu['error']}. Try --device cpu.")
    workers = min(len(names), max(1, (os.cpu_count() or 2) // 2))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        futures = [pool.submit(predict_one, name, is_small, gpu) for name in names]
        rows = [future.result() for future in futures]
    if recorded:
        _write(given.out, [beside(*pair) for pair in zip(rows, recorded, strict=True)])
        return 0
    _write(given.out, rows)
    if not given.only:
        rows.append({"name": SELECTED} | alone(copy_seconds, torch.device(given.device)))
    for row in rows:
        if "predicted" not in row:
            print(f"{row['name']}: {row.get('refused') or 'measured alone'}")
            continue
        row.update(alone(measure_one, row["name"], given.device, given.steps))
        if "measured" in row:
            row["errors"] = _errors(row["predicted"], row["measured"])
        _write(given.out, rows)
        print(f"{row['name']}: {row.get('errors') or row.get('error')}", flush=True)
    return 0


def beside(row: dict[str, Any], real: dict[str, Any]) -> dict[str, Any]:
    """Return a row of predictions with the measured figures of a recorded row."""
    return {
        **row,
        "measured": real["measured"],
        "errors": _errors(row["predicted"], real["measured"]),
        "versions": _versions(),
        "measured_with": real["versions"],
    }


def _is_static(name: str) -> bool:
    return f"{name.partition(',')[0]}, captured" in RECIPES and CONFIGURATIONS[name][2] == STATIC


def _versions() -> dict[str, str]:
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


def _read(path: Path | None) -> list[Any]:
    return json.loads(path.read_text()) if path else []


def _write(out: Path, rows: list[Any]) -> None:
    out.write_text(json.dumps(rows, indent=1, default=str) + "\n")


if __name__ == "__main__":
    sys.exit(main())
