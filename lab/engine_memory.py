"""Measure the memory of exported models in ONNX Runtime and OpenVINO on the CPU, beside its prediction.

    OMP_NUM_THREADS=1 python lab/engine_memory.py OUT.json [--only WORD]
    python lab/engine_memory.py OUT.json --fit

A process exports a model, and another one loads the file and runs `CALLS` calls. A row has the growth of its
resident memory from before the load to the peak. Rows are added to those that the file has already, which
keep their place.

`--fit` measures nothing, and predicts the rows again. It prints the constants of `session_memory.py` that fit
the rows of `FITTED` best. The errors of all rows follow.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers.exporters.auto  # noqa: F401  (imports in the measured process would count)

from snugfit.features.engines import export, session
from snugfit.features.engines.session_memory import (
    ENGINES,
    SessionModel,
    SessionParts,
    occupied_bytes,
    session_parts,
)
from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.step.open_step import open_step
from snugfit.step.step import Observer
from snugfit.techniques.recipe import Recipe
from snugfit.versions import versions

CALLS = 3
CPU = torch.device("cpu")

MODELS: dict[str, dict[str, Any]] = {
    "bert": {
        "model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 512,
        "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 2048, "vocab_size": 8192,
        "max_position_embeddings": 1024,
    },
    "llama": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512,
        "intermediate_size": 1376, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
        "vocab_size": 16000, "max_position_embeddings": 1024,
    },
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 384, "n_layer": 6, "n_head": 6,
        "vocab_size": 12000, "n_positions": 1024,
    },
}  # fmt: skip
MODELS["wide bert"] = MODELS["bert"] | {
    "hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12, "intermediate_size": 3072,
}  # fmt: skip
MODELS["wide llama"] = MODELS["llama"] | {
    "hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12, "intermediate_size": 2048,
}  # fmt: skip
GENERATES = {"phase": "generate", "phase_settings": {"new_tokens": 16}}

CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "bert 1 x 16": ("bert", 1, 16, {}),
    "bert 8 x 128": ("bert", 8, 128, {}),
    "bert 4 x 512": ("bert", 4, 512, {}),
    "llama 4 x 256": ("llama", 4, 256, {}),
    "llama 4 x 256 + 16": ("llama", 4, 256, GENERATES),
    "wide bert 4 x 256": ("wide bert", 4, 256, {}),
    "wide bert 16 x 128": ("wide bert", 16, 128, {}),
    "llama 2 x 640": ("llama", 2, 640, {}),
    "gpt2 4 x 256": ("gpt2", 4, 256, {}),
    "gpt2 8 x 200 + 16": ("gpt2", 8, 200, GENERATES),
    "gpt2 1 x 16 + 16": ("gpt2", 1, 16, GENERATES),
    "llama 8 x 512 + 16": ("llama", 8, 512, GENERATES),
    "llama 2 x 640 + 16": ("llama", 2, 640, GENERATES),
    "wide llama 4 x 256 + 16": ("wide llama", 4, 256, GENERATES),
}
"""Model, batch size, sequence length and phase, by name."""

FITTED = (
    "bert 1 x 16", "bert 8 x 128", "bert 4 x 512", "llama 4 x 256", "wide bert 4 x 256",
    "llama 4 x 256 + 16", "gpt2 8 x 200 + 16", "gpt2 1 x 16 + 16", "llama 8 x 512 + 16",
)  # fmt: skip
"""Cases whose rows the constants are fitted to. The others test them."""

COLUMNS = {"evaluate": ("weights", "activations", "outputs"), "generate": ("weights", "activations")}
"""Bytes with a fitted factor, by phase. A generation has the constant part of an evaluation."""


def job_of(name: str) -> Job:
    model, batch, length, phase = CASES[name]
    fields: dict[str, Any] = {"phase": "evaluate", **phase}
    found = Model.from_config(MODELS[model], name=model)
    return Job(model=found, batch_size=batch, sequence_length=length, **fields)


def write_export(engine: str, job: Job, folder: Path) -> None:
    torch.manual_seed(1)
    step: Any = open_step(job, Recipe().setup(), "plain", CPU)
    step.run(0, Observer())
    facts = export.write_export(export.FORMATS[engine], job, step, folder)
    (folder / "facts.json").write_text(json.dumps(facts))


def run_export(engine: str, job: Job, folder: Path, answers: Any) -> None:
    """Put the growth of this process's resident memory: after the load, after each call, and at the peak."""
    facts = json.loads((folder / "facts.json").read_text())
    step: Any = open_step(job, Recipe.parse(engine).setup(), "plain", CPU)
    model, arguments = session.skeleton(step), session.runner_arguments(engine, step)
    session.check_file(engine, folder)
    gc.collect()
    before = occupied_bytes(CPU)
    exported = session.load(engine, folder, step, arguments)
    loaded = occupied_bytes(CPU) - before
    step.evaluated_model = lambda: session.with_forward(model, exported, CPU, facts.get("cache"))
    after: list[int] = []

    class Reader(Observer):
        def step_ends(self, index: int) -> None:
            after.append(occupied_bytes(CPU, peak=True) - before)

    step.run(CALLS, Reader())
    answers.put({"loaded_bytes": loaded, "after_calls": after, "session_bytes": after[-1]})


def measured(engine: str, name: str) -> dict[str, Any]:
    fork = multiprocessing.get_context("fork")
    job, answers = job_of(name), fork.Queue()
    with tempfile.TemporaryDirectory() as folder:
        for function, further in ((write_export, ()), (run_export, (answers,))):
            process = fork.Process(target=function, args=(engine, job, Path(folder), *further))
            process.start()
            process.join()
            if process.exitcode:
                return {"error": f"{function.__name__} ended with {process.exitcode}"}
    found: dict[str, Any] = answers.get()
    return found


def parts_of(name: str, engine: str) -> SessionParts:
    return session_parts(job_of(name), Recipe().setup(), engine)


def fit(rows: list[dict[str, Any]]) -> None:
    """Print the constants that fit the rows of `FITTED`, and the errors of all rows."""
    for row in rows:
        for key in ("parts", "predicted_bytes", "error"):
            row.pop(key, None)
    for engine, models in ENGINES.items():
        for phase, constants in models.items():
            own = [
                row
                for row in rows
                if row["engine"] == engine
                and "session_bytes" in row
                and (CASES[row["name"]][3] == GENERATES) is (phase == "generate")
            ]
            fit_phase(f"{engine}, {phase}", constants, COLUMNS[phase], own)


def fit_phase(name: str, constants: SessionModel, keys: Sequence[str], own: list[dict[str, Any]]) -> None:
    engine = name.partition(",")[0]
    for row in own:
        row["parts"] = parts_of(row["name"], engine)._asdict()
        row["predicted_bytes"] = constants.session_bytes(SessionParts(**row["parts"]))
        row["error"] = row["predicted_bytes"] / row["session_bytes"] - 1
    fitted = [row for row in own if row["name"] in FITTED]
    free_base = [1e6] if "outputs" in keys else []
    if len(fitted) > len(keys):
        matrix = torch.tensor(
            [[*free_base, *(row["parts"][key] for key in keys)] for row in fitted], dtype=torch.float64
        )
        real = torch.tensor([row["session_bytes"] for row in fitted], dtype=torch.float64)
        rest = real if free_base else real - constants.base
        # Relative errors are minimized.
        print(name, torch.linalg.lstsq(matrix / real[:, None], rest / real).solution.tolist())
    for row in own:
        kind = "fit " if row["name"] in FITTED else "test"
        sizes = " ".join(f"{key} {row['parts'][key] / 1e6:.1f}" for key in row["parts"])
        print(
            f"{kind} {engine} {row['name']}: {row['session_bytes'] / 1e6:.1f} MB, predicted "
            f"{row['predicted_bytes'] / 1e6:.1f} ({row['error']:+.1%}); {sizes}"
        )
    for kind in ("tested", "all"):
        errors = [abs(row["error"]) for row in own if kind == "all" or row["name"] not in FITTED]
        if errors:
            print(f"{name}: median {statistics.median(errors):.1%}, largest {max(errors):.1%} of {kind} rows")


def main() -> None:
    """Measure the cases beside their predictions, and write the rows after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--fit", action="store_true", help="predict the rows of the file again")
    given = parser.parse_args()
    rows = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
    present = {(row["engine"], row["name"]) for row in rows if "session_bytes" in row}
    for name in CASES:
        for engine in () if given.fit else ENGINES:
            if given.only in f"{name}, {engine}" and (engine, name) not in present:
                rows.append({"engine": engine, "name": name} | measured(engine, name))
                print(rows[-1], flush=True)
                write(given.out, rows)
    fit(rows)
    write(given.out, rows)


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    import onnxruntime
    import openvino

    libraries = {"onnxruntime": onnxruntime.__version__, "openvino": openvino.__version__}
    document = {"versions": versions() | libraries, "rows": rows}
    out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
