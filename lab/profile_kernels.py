"""Profile steps on a GPU, kernel by kernel, and their host, phase by phase.

    python lab/profile_kernels.py device OUT.json SEED DRAWS
    python lab/profile_kernels.py device OUT.json ACCURACY.json
    python lab/profile_kernels.py host OUT.json SECONDS [newer]

`device` runs drawn jobs (those of `draw_runs.py`) and the jobs named below, one after the other in this
process. Events time each job in its steady state (`step_seconds`, the median). Then one step runs under
`torch.profiler` with its operands' shapes. The file holds every operator with its sizes, dtypes and kernel,
its count and its total seconds (`device_seconds` is their sum). Further steps with the device drained show
the host alone (`host_seconds_drained`, by phase). The rates of a device are fitted to such a file
(`prediction/rates.json`). With a result of `snugfit accuracy`, `device` instead runs some of its steady runs.
Those are the runs whose predicted seconds are off by more than `OFF`.

`host` runs families in a small size under recipes, in a mixed order, until the seconds are over. The device
has next to nothing to do. `newer` runs four families of text under techniques that came later. Steady steps
are timed one after the other. Some more follow with the device drained before each, and their clock is read
at the boundaries of phases. The thread runs on quiet cores (`measurement/quiet_core.py`). Each drained step
has the seconds of a loop of pure Python beside it.
"""

from __future__ import annotations

import gc
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from draw_runs import proposals
from families import FAMILIES, Family
from torch.profiler import ProfilerActivity, profile

from snugfit.errors import SnugfitError
from snugfit.job.config import check_facts
from snugfit.job.find import read_preset
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.measurement.quiet_core import QuietCore
from snugfit.measurement.stopwatch import MAX_STABLE_SPREAD
from snugfit.step.open_step import open_step
from snugfit.techniques.recipe import Recipe
from snugfit.versions import versions

WARMUP, TIMED, DRAINED = 4, 14, 4
OFF = 0.08
LOOP_ITERATIONS = 1_500
"""Iterations of the loop of pure Python."""

NAMED = (
    ("openai-community/gpt2", "causal-lm", 16, 1024, ("bf16", "fp16 + adamw_fused", "plain")),
    ("google-t5/t5-large", "seq2seq-lm", 16, 512, ("eager + tf32 + adamw_fused", "tf32", "bf16")),
    ("meta-llama/Llama-3.2-1B", "causal-lm", 8, 1024, ("bf16 + adamw_fused", "fp16")),
    ("Qwen/Qwen2.5-0.5B", "causal-lm", 4, 2048, ("fp16 + expandable", "bf16 + every_nth_layer(n=4)")),
    ("bert-large-uncased", "sequence-classification", 32, 512, ("bf16", "plain", "tf32 + every_layer")),
    ("bert-large-uncased", "sequence-classification", 4, 512, (
        "plain", "bf16", "fp16", "tf32", "bf16 + adamw_fused", "every_layer + bf16 + micro_batches(4)",
        "adafactor + bf16", "sgd + bf16", "adamw_8bit + bf16", "adamw_loop + bf16", "eager + bf16",
        "adafactor_torch + bf16", "bf16_pure + adamw_fused",
    )),
)  # fmt: skip
RECIPES = (
    "plain", "bf16", "bf16 + every_layer", "fp16 + adamw_fused", "eager", "eager + bf16 + segments",
    "micro_batches(2)", "bf16 + micro_batches(2) + adamw_loop", "adafactor", "bf16 + adafactor_torch", "sgd",
    "adamw_8bit", "lora(r=16)", "lora(r=16, targets=all-linear) + bf16 + every_layer", "bf16_pure",
    "workers", "workers + micro_batches(4) + tf32", "bf16 + micro_batches(4) + every_layer",
)  # fmt: skip
NEWER_RECIPES = (
    "plain", "bf16", "lora(r=16) + bf16", "qlora(r=16)", "qlora(r=16) + bf16",
    "qlora(r=16, targets=all-linear) + bf16 + every_layer", "liger(fused_linear_cross_entropy=false)",
    "liger(fused_linear_cross_entropy=false) + bf16", "host(all)", "host(all) + every_layer",
    "host(all) + lora(r=16) + bf16", "apollo(rank=8)", "galore(rank=8)", "adamw_4bit", "chunked_loss",
    "compiled + bf16", "compiled + lora(r=16)",
)  # fmt: skip
NEWER_FAMILIES = ("llama", "qwen2", "gpt2", "mistral")


class Watch:
    """An observer that times steps, profiles one, and reads the clock at the phases of drained ones."""

    def __init__(self, *, device: bool) -> None:
        self.boundaries: list[torch.cuda.Event] = []
        self.marks: list[tuple[str, float]] = []
        self.drained: list[tuple[float, dict[str, float]]] = []
        self.profiler: Any = None
        self.last = WARMUP + TIMED
        """Last steady step. With a device this one is profiled."""
        self.profiled = self.last if device else -1
        self.quiet = self.last + 1
        """First step with a drained device."""
        self.core = None if device else QuietCore()
        self._loop_seconds = 0.0

    def build_ends(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Do nothing, because construction is not timed."""

    def phase(self, name: str) -> None:
        """Record the beginning of a phase."""
        self.marks.append((name, time.perf_counter()))

    def step_begins(self, index: int) -> None:
        """Mark a boundary.

        The profiled step begins with its profiler, the last ones with a drained device.
        """
        if self.core and index:
            self.core.rebalance()
        if index == self.profiled or index >= self.quiet:
            torch.cuda.synchronize()
        if index == self.profiled:
            activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
            self.profiler = profile(activities=activities, record_shapes=True)
            self.profiler.__enter__()
        if WARMUP <= index <= self.last:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.boundaries.append(event)
        if index >= self.quiet:
            self._loop_seconds = time_loop()
        self.marks = []

    def step_ends(self, index: int) -> None:
        """Stop the profiler after the device has ended its work, or record a drained step."""
        self.phase("end")
        if index == self.profiled:
            torch.cuda.synchronize()
            self.profiler.__exit__(None, None, None)
        if index >= self.quiet:
            spent: dict[str, float] = defaultdict(float)
            for (name, begin), (_, end) in zip(self.marks, self.marks[1:], strict=False):
                spent[name] += end - begin
            self.drained.append(((self._loop_seconds + time_loop()) / 2, dict(spent)))


def time_loop() -> float:
    """Return the seconds of a loop of pure Python."""
    begin = time.perf_counter()
    for _ in range(LOOP_ITERATIONS):
        pass
    return time.perf_counter() - begin


def kernels(profiler: Any) -> list[list[Any]]:
    """Return lines of the profiled step: operator, sizes of its tensors, dtypes, kernel, count,
    microseconds."""
    with tempfile.TemporaryDirectory() as room:
        file = Path(room) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    operators = {event["args"].get("External id"): event for event in events if event.get("cat") == "cpu_op"}
    lines: dict[str, list[Any]] = {}
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        operator = operators.get(event["args"].get("External id"))
        arguments = operator["args"] if operator else {}
        what = [
            operator["name"] if operator else "?",
            [size for size in arguments.get("Input Dims", []) if size and not isinstance(size[0], list)][:3],
            arguments.get("Input type", [])[:3],
            event["name"][:40],
        ]
        line = lines.setdefault(json.dumps(what), [*what, 0, 0.0])
        line[4] += 1
        line[5] = round(line[5] + event["dur"], 2)
    return list(lines.values())


def off_jobs(file: Path) -> Iterator[tuple[Job, Recipe]]:
    """Yield the steady runs of this result whose predicted seconds are off."""
    for run in json.loads(file.read_text())["runs"]:
        predicted, measured = run["predicted_step_seconds"], run["step_seconds"]
        if not predicted or not measured or run["spread"] >= MAX_STABLE_SPREAD:
            continue
        if abs(predicted / measured - 1) > OFF:
            yield Job.from_json(run["job"]), Recipe.parse(run["recipe"])


def device_jobs(seed: int, draws: int) -> Iterator[tuple[Job, Recipe]]:
    """Yield the jobs of `NAMED` and drawn ones."""
    for name, task, batch, length, recipes in NAMED:
        for recipe in recipes:
            sizes = {"batch_size": batch, "sequence_length": length}
            job = Job(model=Model.find(name), task=Task.parse(task), dtype="float32", **sizes)  # type: ignore[arg-type]
            yield job, Recipe.parse(recipe)
    for number in range(draws):
        drawn = next(proposals(seed, number))
        yield drawn.job, drawn.recipe


def host_jobs(newer: bool) -> Iterator[tuple[Job, Recipe]]:
    """Yield every family in a small size, in an order without correlation with any state of the host."""
    families = [family for family in FAMILIES if not newer or family.name in NEWER_FAMILIES]
    recipes = NEWER_RECIPES if newer else RECIPES
    pairs = [(small_job(family), Recipe.parse(recipe)) for family in families for recipe in recipes]
    random.Random(5).shuffle(pairs)
    yield from pairs


def small_job(family: Family, depth: int = 6, heads: int = 6) -> Job:
    """Return a job of this family with next to nothing to do for a device."""
    facts, head = dict(read_preset(family.preset)), family.head_widths[0]
    sizes = {"depth": depth, "width": heads * head, "heads": heads, "inner": 2 * heads * head}
    for size, keys in family.keys:
        facts |= dict.fromkeys(keys, sizes[size])
    facts |= {key: head for key in (family.free_heads, "head_dim") if key in facts}
    facts |= {key: values[0] for key, values in family.choices}
    if family.grouped:
        facts["num_key_value_heads"] = 2
    if family.vocabulary:
        facts[family.vocabulary] = 8_000
        tokens = {name: value for name, value in facts.items() if name.endswith("_token_id")}
        facts |= {name: value % 8_000 for name, value in tokens.items() if isinstance(value, int)}
    model = Model.from_config(
        check_facts(facts, where=family.name), name=f"{family.name}-small", origin="drawn"
    )
    sizes = {"batch_size": 4, "sequence_length": 64, "target_length": 64}
    return Job(model=model, task=family.tasks[-1], dtype="float32", **sizes)  # type: ignore[arg-type]


def run_profiled(job: Job, recipe: Recipe, *, device: bool) -> dict[str, Any]:
    """Run one job under the watch and return its row."""
    watch = Watch(device=device)
    step = open_step(job, recipe.setup(), "plain", torch.device("cuda"))
    step.run(watch.quiet + DRAINED, watch)
    torch.cuda.synchronize()
    pairs = zip(watch.boundaries, watch.boundaries[1:], strict=False)
    seconds = [begin.elapsed_time(end) / 1000 for begin, end in pairs]
    row: dict[str, Any] = {
        "job": job.to_json(),
        "recipe": str(recipe),
        "seconds": seconds,
        "step_seconds": statistics.median(seconds),
        "host_seconds_drained": by_phase(watch.drained),
        "drained": watch.drained,
    }
    if watch.core:
        watch.core.release()
        row["disturbed"] = watch.core.disturbed_share()
    if device:
        row["kernels"] = kernels(watch.profiler)
        row["device_seconds"] = sum(microseconds for *_, microseconds in row["kernels"]) / 1e6
    return row


def by_phase(drained: list[tuple[float, dict[str, float]]]) -> dict[str, float]:
    """Return the seconds of each phase, as the mean of the drained steps."""
    return {name: statistics.mean(spent[name] for _, spent in drained) for name in drained[0][1]}


def write(out: Path, what: str, runs: list[dict[str, Any]]) -> None:
    """Write the rows with the GPU, the date and the versions."""
    document = {
        "schema": 1,
        "what": what,
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions(),
        "runs": runs,
    }
    out.write_text(json.dumps(document, separators=(",", ":")) + "\n")


def main() -> None:
    """Run the command and write its output file."""
    kind, out = sys.argv[1], Path(sys.argv[2])
    device = kind == "device"
    runs = []
    end = math.inf if device else time.monotonic() + float(sys.argv[3])
    if not device:
        jobs = host_jobs(newer=sys.argv[4:] == ["newer"])
    elif len(sys.argv) > 4:
        jobs = device_jobs(int(sys.argv[3]), int(sys.argv[4]))
    else:
        jobs = off_jobs(Path(sys.argv[3]))
    for job, recipe in jobs:
        if time.monotonic() > end:
            break
        try:
            recipe.check(job)
            runs.append(run_profiled(job, recipe, device=device))
        except (SnugfitError, torch.cuda.OutOfMemoryError) as refused:
            print(f"{job.model.name}, {recipe}: {refused}", file=sys.stderr)
        gc.collect()
        torch.cuda.empty_cache()
    write(out, f"profiled-{kind}", runs)


if __name__ == "__main__":
    main()
