"""Measure the engines of evaluation and generation by turns, on small models on the CPU.

    OMP_NUM_THREADS=1 python lab/engine_speed.py OUT.json [--rounds N] [--only WORD]
    python lab/engine_speed.py results/cpu-2026-11-30/engines.json --guide

With `--guide` it measures nothing, and copies the file's ratios to the table of `snugfit guide --inference`.

In each round every engine has a turn: one call that is not timed, then `CALLS` timed ones. So a load of the
machine that lasts for seconds is shared by all. CPU seconds are those of all threads of the process, and
wall seconds are beside them. Evaluations are called without labels, because exported models have no loss.
Outputs are compared with the plain model in fp32 after the last turn. A compiled first call may
come from the compiler's cache on disk. The first set-up includes imports.

`nn.TransformerEncoder` has torch's own fast path, with and without padding. Its eager row has the path
switched off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.measurement.child import results_of
from snugfit.step.open_step import open_step
from snugfit.step.step import Observer
from snugfit.techniques.recipe import Recipe
from snugfit.versions import version_of, versions

CALLS, ROUNDS = 5, 12

GUIDE = Path(__file__).parent.parent / "src/snugfit/features/guide/measured_engines.json"
"""The measured engines of `snugfit guide --inference`, which are part of the wheel."""

COPIED = ("job", "engine", "times_faster_cpu", "times_faster_wall", "largest_error", "ids_equal")
LIBRARIES = ("torch", "transformers", "onnxruntime", "openvino")

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 8192,
    "max_position_embeddings": 512,
}  # fmt: skip
BERT = {
    "model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512, "vocab_size": 30522,
    "max_position_embeddings": 512,
}  # fmt: skip
EVALUATE: dict[str, Any] = {"phase": "evaluate"}
GENERATE: dict[str, Any] = {"phase": "generate", "phase_settings": {"new_tokens": 16}}
STATIC: dict[str, Any] = {"phase": "generate", "phase_settings": {"new_tokens": 16, "cache": "static"}}
WHOLE = "compiled(what=model)"

JOBS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, dict[str, Any]]]] = {
    "Llama 4 x 256, evaluate 2 x 128": (
        LLAMA,
        {"batch_size": 2, "sequence_length": 128},
        dict.fromkeys(("plain", WHOLE, "onnxruntime", "openvino"), EVALUATE),
    ),
    "Llama 4 x 256, generate 2 x 64 + 16": (
        LLAMA,
        {"batch_size": 2, "sequence_length": 64},
        {**dict.fromkeys(("plain", "onnxruntime", "openvino"), GENERATE), WHOLE: STATIC},
    ),
    "BERT 2 x 128, evaluate 4 x 128": (
        BERT,
        {"batch_size": 4, "sequence_length": 128},
        dict.fromkeys(("plain", "compiled", "fastpath", "onnxruntime", "openvino"), EVALUATE),
    ),
    "BERT 2 x 128, evaluate 4 x 128, half padding": (
        BERT,
        {"batch_size": 4, "sequence_length": 128, "padding": 0.5},
        dict.fromkeys(("plain", "fastpath"), EVALUATE),
    ),
}
"""Config, sizes, and the phase of each recipe, by the name of a job."""


class Runner:
    """A built engine, its calls, and their seconds."""

    def __init__(self, build: Callable[[], Callable[[], Any]]) -> None:
        begin = time.perf_counter()
        self.call = build()
        built = time.perf_counter()
        self.call()
        self.setup, self.first = built - begin, time.perf_counter() - built
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def turn(self) -> None:
        """Make one call that is not timed, and `CALLS` that are."""
        self.call()
        for _ in range(CALLS):
            cpu, wall = time.process_time(), time.perf_counter()
            self.call()
            self.cpu.append(time.process_time() - cpu)
            self.wall.append(time.perf_counter() - wall)

    def row(self) -> dict[str, Any]:
        """Return the set-up, the first call, and the percentiles of the timed calls."""
        return {
            "setup_seconds": self.setup,
            "first_call_seconds": self.first,
            **_percentiles(self.cpu, "cpu_seconds"),
            **_percentiles(self.wall, "wall_seconds"),
            "calls": len(self.cpu),
        }


def _percentiles(values: list[float], unit: str) -> dict[str, float]:
    return {f"median_{unit}": statistics.median(values), f"p90_{unit}": statistics.quantiles(values, n=10)[8]}


def step_of(config: dict[str, Any], sizes: dict[str, Any], recipe: str, phase: dict[str, Any]) -> Any:
    """Return the step of a job under a recipe, not yet built."""
    job = Job(model=Model.from_config(config, name=config["model_type"]), **sizes, **phase)
    parsed = Recipe.parse(recipe)
    parsed.check(job)
    return open_step(job, parsed.setup(), "plain", torch.device("cpu"))


def call_of(step: Any) -> Callable[[], Any]:
    """Build a step, and return a function that calls its model for the first batch."""
    from transformers import GenerationMixin

    torch.manual_seed(0)
    step.run(0, Observer())
    inputs = {name: value for name, value in step.first_batch().items() if name != "labels"}
    if step.job.added_phase is None:
        return torch.no_grad()(lambda: step.model(**inputs))
    config = step.generation_config
    return torch.no_grad()(lambda: GenerationMixin.generate(step.model, **inputs, generation_config=config()))


def measure_job(name: str, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each engine of a job."""
    config, sizes, recipes = JOBS[name]
    steps = {recipe: step_of(config, sizes, recipe, phase) for recipe, phase in recipes.items()}
    runners = {recipe: Runner(lambda step=step: call_of(step)) for recipe, step in steps.items()}
    take_turns(runners, rounds)
    rows = rows_of(name, runners, "plain")
    # A dictionary's own "engine" is the recipe here, with the version of the library in the other.
    return [results_of(steps[row["engine"]], 0) | row for row in rows]


def measure_encoder(rounds: int) -> list[dict[str, Any]]:
    """Return rows of `nn.TransformerEncoder` with and without its fast path."""
    rows: list[dict[str, Any]] = []
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 4).eval()
    tokens = torch.randn(4, 128, 256)
    padded = torch.arange(128).expand(4, 128) >= torch.tensor([[32], [64], [64], [96]])
    for name, mask in (("no padding", None), ("half padding", padded)):

        def call(fast: bool, mask: Any = mask) -> Any:
            torch.backends.mha.set_fastpath_enabled(fast)
            with torch.no_grad():
                return encoder(tokens, src_key_padding_mask=mask)

        engines = {"eager": False, "fastpath": True}
        runners = {engine: Runner(lambda fast=fast: lambda: call(fast)) for engine, fast in engines.items()}
        take_turns(runners, rounds)
        new = rows_of(f"nn.TransformerEncoder 4 x 256, evaluate 4 x 128, {name}", runners, "eager")
        kept = slice(None) if mask is None else ~mask
        new[1]["largest_error"] = float((call(True)[kept] - call(False)[kept]).abs().max())
        rows += new
    return rows


def take_turns(runners: dict[str, Runner], rounds: int) -> None:
    """Let each engine have a turn in each round, in an order that rotates."""
    engines = list(runners.values())
    for number in range(rounds):
        first = number % len(engines)
        for runner in engines[first:] + engines[:first]:
            runner.turn()


def rows_of(name: str, runners: dict[str, Runner], base: str) -> list[dict[str, Any]]:
    """Return the rows of a job, with ratios of eager seconds to those of the engine, and print them."""
    rows = [{"job": name, "engine": engine, **runner.row()} for engine, runner in runners.items()]
    eager = next(row for row in rows if row["engine"] == base)
    for row in rows:
        for unit in ("cpu", "wall"):
            row[f"times_faster_{unit}"] = eager[f"median_{unit}_seconds"] / row[f"median_{unit}_seconds"]
        print(
            f"{name:60} {row['engine']:22} CPU {1e3 * row['median_cpu_seconds']:7.2f} ms "
            f"({row['times_faster_cpu']:.2f} x), wall {1e3 * row['median_wall_seconds']:7.2f} ms "
            f"({row['times_faster_wall']:.2f} x), load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    return rows


def guide_table(path: Path) -> dict[str, Any]:
    """Return the guide's table of measured engines from a written file, whose folder ends with its date."""
    document = json.loads(path.read_text(encoding="utf-8"))
    threads, cores = document["threads"], document["cores"]
    cpu = document.get("cpu", "a shared CPU")
    return {
        "source": "/".join(path.parts[-3:]),
        "machine": f"{cpu} with {cores} cores, {threads} thread{'s' * (threads != 1)}",
        "date": "-".join(path.parent.name.split("-")[-3:]),
        "versions": {name: document["versions"][name] for name in LIBRARIES},
        "rows": [{key: row[key] for key in COPIED if key in row} for row in document["rows"]],
    }


def main() -> None:
    """Measure all jobs, and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", default="", help="jobs whose name contains this word")
    parser.add_argument("--guide", action="store_true", help="copy the ratios of OUT.json to the guide")
    given = parser.parse_args()
    if given.guide:
        GUIDE.write_text(json.dumps(guide_table(given.output.resolve()), indent=1) + "\n", encoding="utf-8")
        return
    before, rows = os.getloadavg(), []
    for name in (name for name in JOBS if given.only in name):
        rows += measure_job(name, given.rounds)
    if given.only in "nn.TransformerEncoder":
        rows += measure_encoder(given.rounds)
    document = {
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load_before": before,
        "load_after": os.getloadavg(),
        "versions": {
            **versions(),
            **{name: version_of(name) for name in ("onnx", "onnxscript", "onnxruntime", "openvino")},
        },
        "rows": rows,
    }
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
