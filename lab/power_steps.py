"""Predict recorded steps at the power limit, with and without the model of power, beside measured seconds.

    python lab/power_steps.py OUT.json    # adds the steps that OUT.json lacks

The steps are those of `results/h200-2026-11-30` with adapters. They are no part of the fit in `rates.json`,
which has single kernels alone. A row has the milliseconds, and the clock in MHz by nvidia-smi.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from snugfit.job.job import Job
from snugfit.job.model import Model
from snugfit.prediction.predict import predict
from snugfit.prediction.rates import packaged_rates
from snugfit.versions import versions

FOLDER = Path(__file__).resolve().parents[1] / "results" / "h200-2026-11-30"

JOBS = {
    "lora-8b-first.json": ("Llama-3.1-8B", 4, 2048),
    "lora-8b.json": ("Llama-3.1-8B", 4, 2048),
    "qlora-8b-1x4096.json": ("Llama-3.1-8B", 1, 4096),
    "qlora-8b-every-layer.json": ("Llama-3.1-8B", 4, 2048),
    "lora-1b.json": ("Llama-3.2-1B", 4, 1024),
    "lora-families.json": ("", 4, 2048),
}
"""Model, samples and tokens of the steps in each file; the rows of the last name their models."""

MODELS = {"SmolLM3-3B": "SmolLM3-3B", "OLMo-2-1B": "OLMo-2-0425-1B", "Phi-3-mini": "Phi-3-mini-4k-instruct"}


def steps() -> list[dict[str, Any]]:
    """Return the recorded steps with the milliseconds and the mean clock of each."""
    found = []
    for name, (model, samples, tokens) in JOBS.items():
        document = json.loads((FOLDER / name).read_text(encoding="utf-8"))
        for row in document if isinstance(document, list) else document["rows"]:
            # One step read weights before they were written, and its losses are NaN.
            if row.get("ms") and not any(map(math.isnan, row.get("losses") or ())):
                clocks = [int(line.split(",")[0]) for line in row.get("smi") or ()]
                found.append({
                    "file": name, "model": model or row["model"], "samples": samples, "tokens": tokens,
                    "recipe": row["recipe"], "ms": row["ms"],
                    "mhz": statistics.fmean(clocks) if len(clocks) > 2 else None,
                })  # fmt: skip
    return found


def predicted(step: dict[str, Any]) -> dict[str, Any]:
    """Return the step with its predicted milliseconds, with and without the model of power."""
    model = Model.find(MODELS.get(step["model"], step["model"]))
    job = Job(model=model, task="causal-lm", batch_size=step["samples"], sequence_length=step["tokens"])
    answer = predict(job, step["recipe"], gpu="h200")
    assert answer.gpu is not None
    rates = replace(packaged_rates(answer.gpu), power=None)
    without = predict(job, step["recipe"], gpu="h200", rates=rates)
    assert answer.timing is not None
    assert without.timing is not None
    return step | {
        "predicted_ms": 1e3 * answer.timing.step_seconds,
        "predicted_mhz": answer.timing.limited_mhz,
        "without_power_ms": 1e3 * without.timing.step_seconds,
    }


def main() -> None:
    """Predict the steps that the file lacks, in two processes; write and print them."""
    out = Path(sys.argv[1])
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"] if out.exists() else []
    rest = [step for step in steps() if not any(step.items() <= row.items() for row in rows)]
    with get_context("fork").Pool(2) as pool:
        for row in pool.imap(predicted, rest):
            ratios = [row[name] / row["ms"] for name in ("without_power_ms", "predicted_ms")]
            text = f"{row['ms']:7.1f} ms  {ratios[0]:.3f} -> {ratios[1]:.3f}  {row['recipe']}"
            print(f"{row['model']:14} {text}", flush=True)
            rows.append(row)
            # A run may be killed at its time limit.
            _write(out, rows)
    _write(out, rows)


def _write(out: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows with their median errors."""
    summary = {
        name: statistics.median(abs(row[name] / row["ms"] - 1) for row in rows)
        for name in ("without_power_ms", "predicted_ms")
    }
    document = {"what": "predicted steps at the power limit", "median_error": summary, "versions": versions()}
    out.write_text(json.dumps(document | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
