"""Predict popular models with three ways of fine-tuning on several GPUs.

    python lab/predict_models.py results/models-DATE.json

The script needs no GPU. It keeps the predictions of an existing file, so an interrupted run continues there.
`lab/site_pages.py` makes a page of the documentation site from the newest file.
"""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from snugfit import Job, Model, find_gpu, predict
from snugfit.documents import write_document
from snugfit.versions import versions


class Sample(NamedTuple):
    """A model with the batch of its predictions."""

    name: str
    batch_size: int
    sequence_length: int
    task: str = "causal-lm"


MODELS = (
    Sample("bert-large-uncased", 32, 512, "sequence-classification"),
    Sample("gpt2-xl", 4, 1024),
    Sample("Llama-3.2-1B", 4, 2048),
    Sample("Llama-3.2-3B", 4, 2048),
    Sample("Mistral-7B-v0.3", 4, 2048),
    Sample("Llama-3.1-8B", 4, 2048),
    Sample("Qwen3-8B", 4, 2048),
    Sample("Qwen3-14B", 4, 2048),
)

GPUS = ("rtx 4090", "l40s", "a100-80gb", "h100")

METHODS = {
    "all weights": "bf16_master + fused + every_layer + micro_batches(4)",
    "LoRA": "lora(r=16, targets=all-linear) + bf16 + every_layer + micro_batches(4)",
    "QLoRA": "qlora(r=16, targets=all-linear) + every_layer + micro_batches(4)",
}
"""The recipe of each way of fine-tuning."""


def predict_cell(sample: Sample, method: str, gpu: str) -> dict[str, Any]:
    """Return the record of a model under a way of fine-tuning on a GPU."""
    job = Job(
        model=Model.find(sample.name),
        task=sample.task,
        batch_size=sample.batch_size,
        sequence_length=sample.sequence_length,
    )
    one = predict(job, METHODS[method], gpu=gpu)
    return {
        "model": sample.name,
        "method": method,
        "gpu": gpu,
        "command": command(sample, gpu, METHODS[method]),
        "needed_bytes": one.needed_bytes,
        "memory_bytes": one.memory_bytes,
        "fits": one.fits,
        "step_seconds": one.speed.step_seconds if one.speed else None,
    }


def command(sample: Sample, gpu: str, recipe: str) -> str:
    """Return the command line that prints this prediction."""
    words = ["snugfit", "predict", sample.name, "--task", sample.task, "--batch-size", str(sample.batch_size)]
    words += ["--sequence-length", str(sample.sequence_length), "--gpu", gpu, "--recipe", recipe]
    return shlex.join(words)


def main() -> None:
    """Write the predictions, after each one, to the file that the command line names."""
    path = Path(sys.argv[1])
    known = json.loads(path.read_text())["predictions"] if path.exists() else []
    cells = {(one["model"], one["method"], one["gpu"]): one for one in known}
    for sample, method, gpu in product(MODELS, METHODS, GPUS):
        if (sample.name, method, gpu) in cells:
            continue
        cells[sample.name, method, gpu] = predict_cell(sample, method, gpu)
        document = {
            "date": datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d"),
            "versions": versions(),
            "gpus": {gpu: find_gpu(gpu).memory_bytes for gpu in GPUS},
            "predictions": list(cells.values()),
        }
        write_document(path, document)


if __name__ == "__main__":
    main()
