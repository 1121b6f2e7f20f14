"""Measure steps of a fitted Trainer on one GPU, each recipe in a process of its own.

    python lab/fit_steps.py OUT.json RECIPE ... [--model NAME] [--batch 4] [--length 1024] [--steps 30]

A process fits transformers' Trainer over random tokens of one length, and times its last steps. Losses and
the largest requested bytes are compared between recipes, such as one with `captured` and one without.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from snugfit.features.loops.trainer.fit import fit
from snugfit.job.model import Model

CUDA = torch.cuda.is_available()


class StepTimes(transformers.TrainerCallback):  # type: ignore[misc]
    """A callback that stores the time at the end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if CUDA:
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def samples(given: argparse.Namespace, vocabulary: int) -> list[dict[str, Any]]:
    """Return random samples of one length for all steps."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (given.steps * given.batch, given.length), generator=draw)
    return [{"input_ids": row, "labels": row} for row in tokens]


def row(given: argparse.Namespace, recipe: str) -> dict[str, Any]:
    """Return seconds, bytes and losses of this recipe, measured in this process."""
    config = json.loads(given.model) if given.model[:1] == "{" else Model.find(given.model).config
    kind = config["model_type"]
    built = transformers.AutoConfig.for_model(**{"model_type": kind, **config})
    torch.manual_seed(0)
    with torch.device("cuda" if CUDA else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(built, dtype=torch.bfloat16)
    times, told = StepTimes(), []
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=given.steps, per_device_train_batch_size=given.batch,
            gradient_accumulation_steps=given.micro, learning_rate=1e-4, logging_steps=1,
            save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=not CUDA,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=samples(given, built.vocab_size), callbacks=[times],
            data_collator=transformers.default_data_collator,
        )  # fmt: skip
        fit(trainer, recipe, watch=lambda event: told.append(event.get("text")))
        trainer.train()
    timed = times.ends[given.steps // 2 :]
    seconds = (timed[-1] - timed[0]) / max(1, len(timed) - 1)
    return {
        "recipe": recipe,
        "ms": seconds * 1000,
        "tokens_per_second": given.micro * given.batch * given.length / seconds,
        "requested": torch.cuda.memory_stats()["requested_bytes.all.peak"] if CUDA else None,
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "norms": [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line],
        "told": [text for text in told if text],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--model", default="meta-llama/Llama-3.2-1B")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--micro", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--alone", action="store_true")
    given = parser.parse_args()
    if given.alone:
        given.out.write_text(json.dumps(row(given, *given.recipes)), encoding="utf-8")
        return
    rows: list[dict[str, Any]] = []
    options = ["--alone", "--model", given.model]
    for name in ("batch", "micro", "length", "steps"):
        options += [f"--{name}", str(getattr(given, name))]
    for recipe in given.recipes:
        part = given.out.with_suffix(".part")
        part.unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, __file__, str(part), recipe, *options],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        found = json.loads(part.read_text()) if part.exists() else {"error": done.stderr[-3000:]}
        rows.append({**found, "recipe": recipe})
        given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
