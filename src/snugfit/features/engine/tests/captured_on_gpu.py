"""Compare steps that are recorded as CUDA graphs with eager steps, on a GPU.

    python captured_on_gpu.py [FILE]    writes its results to FILE as JSON; fails where one is wrong

`test_captured.py` runs recorded work again in Python; here the GPU replays it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from small_runs import events, killed_in, losses, rows, small_run
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.step.open_step import open_step
from snugfit.step.step import Observer
from snugfit.techniques.recipe import Recipe
from snugfit.training.run.run import Run
from snugfit.training.run.train import train

CUDA = torch.device("cuda", 0)
STEPS = 12
BERT: dict[str, Any] = {
    "model_type": "bert", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 1024, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 512,
}  # fmt: skip
RECOMPUTED = "bf16_master + adamw_fused + fused + chunked_loss + first_layers(k=2)"
KEPT = "bf16 + adamw_fused + fused + selective(attention)"
DROPPED = "bf16 + adamw_fused + padding_free"
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Quiet(Observer):
    """An observer that ignores all events."""


def job_of(config: dict[str, Any], **more: Any) -> Job:
    model = Model.from_config(config, name=str(config["model_type"]))
    task = Task.CAUSAL_LM if config is LLAMA else Task.SEQUENCE_CLASSIFICATION
    wanted = {"batch_size": 4, "sequence_length": 128, "clip": 1.0, "learning_rate": 1e-3, **more}
    return Job(model=model, task=task, **wanted)


def plain_losses(job: Job, recipe: str) -> tuple[list[float], Any]:
    torch.manual_seed(11)
    step: Any = open_step(job, Recipe.parse(recipe).setup(), "plain", CUDA, keep_losses=True)
    return step.run(STEPS, Quiet()), step


def compare_plain(name: str, job: Job, recipe: str) -> dict[str, Any]:
    """Compare losses and weights of snugfit's plain loop with eager steps and with replayed graphs."""
    written, one = plain_losses(job, recipe)
    played, other = plain_losses(job, f"{recipe} + captured")
    ours, theirs = other.model.state_dict(), one.model.state_dict()
    apart = max(float((ours[key].float() - theirs[key].float()).abs().max()) for key in ours)
    moved = [float(value.float().abs().sum()) for value in ours.values() if value.is_floating_point()]
    return {
        "case": name,
        "recipe": recipe,
        "why_not": other.runner.why_not,
        "losses_apart": max(abs(a - b) for a, b in zip(written, played, strict=True)),
        "weights_apart": apart,
        "right": not other.runner.why_not and written[0] == played[0] and written != played[:1] * STEPS
        and max(abs(a - b) for a, b in zip(written, played, strict=True)) < 2e-2 and all(moved),
        "losses": [written, played],
    }  # fmt: skip


def compare_dropped(name: str, job: Job, recipe: str) -> dict[str, Any]:
    """Compare losses of a replayed step without padding and of an eager step that computes padding."""
    padded, _ = plain_losses(job, recipe)
    dropped, step = plain_losses(job, f"{recipe} + padding_free + captured")
    apart = max(abs(a - b) for a, b in zip(padded, dropped, strict=True))
    return {
        "case": name, "recipe": recipe, "why_not": step.runner.why_not, "losses_apart": apart,
        "right": not step.runner.why_not and apart < 2e-2 and len(set(dropped)) > 1,
        "losses": [padded, dropped],
    }  # fmt: skip


def refused_one(name: str, job: Job, recipe: str) -> dict[str, Any]:
    """Check that a step that cannot be recorded reports a reason, and trains eagerly."""
    written, _ = plain_losses(job, recipe)
    played, other = plain_losses(job, f"{recipe} + captured")
    why_not = other.runner.why_not
    right = "draws random numbers" in why_not and written == played
    return {"case": name, "recipe": recipe, "why_not": why_not, "right": right}


def run_of(folder: Path, recipe: str, job: Job, **options: Any) -> Run:
    """Return a run of 12 steps over rows of several lengths, on the GPU."""
    run = small_run(folder, recipe, job=job, samples=rows(42, vocabulary=96), **options)
    return replace(run, device=CUDA)


def compare_runs(name: str, config: dict[str, Any], recipe: str) -> dict[str, Any]:
    """Compare a replayed run, a replayed run that is killed and resumed, and an eager run. The eager losses
    are compared only where dropout draws the same numbers despite the padding."""
    job = job_of({**config, "vocab_size": 96}, sequence_length=16)
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        written = train(run_of(here / "written", recipe, job))
        played = train(run_of(here / "played", f"{recipe} + captured(multiple=16)", job))
        killed_in(run_of(here / "killed", f"{recipe} + captured(multiple=16)", job, save_steps=5), 8)
        resumed = train(run_of(here / "killed", f"{recipe} + captured(multiple=16)", job, save_steps=5))
        by_step = [losses(here / one) for one in ("written", "played", "killed")]
        told = [one["text"] for one in events(here / "played", "warning")]
    alike = all(
        torch.equal(value, resumed.model.state_dict()[key])
        for key, value in played.model.state_dict().items()
    )
    apart = max(abs(a[0] - b[0]) for a, b in zip(by_step[0].values(), by_step[1].values(), strict=True))
    return {
        "case": name, "recipe": recipe, "warnings": told, "losses_apart_from_written": apart,
        "resumed_is_the_same": by_step[1] == by_step[2] and alike,
        "right": not told and (apart < 2e-2 or config is BERT) and by_step[1] == by_step[2] and alike,
        "steps": written.step, "losses": [list(one.values()) for one in by_step],
    }  # fmt: skip


def cases() -> list[Callable[[], dict[str, Any]]]:
    still = {**BERT, **STILL}
    drawn = {**BERT, "attention_probs_dropout_prob": 0.0}  # attention draws for each sequence
    return [
        partial(compare_plain, "bert, fp32", job_of(still), "adamw_fused"),
        partial(compare_plain, "bert, dropout", job_of(BERT), "bf16 + adamw_fused"),
        partial(compare_plain, "bert, foreach", job_of(still), "bf16 + adamw"),
        partial(compare_plain, "micro-batches", job_of(BERT), "bf16 + adamw_fused + micro_batches(4)"),
        partial(compare_plain, "bert, padding", job_of(still, padding=0.3), "bf16 + adamw_fused"),
        partial(compare_plain, "bert, masters", job_of(BERT), "bf16_master + adamw_fused"),
        partial(compare_plain, "bert, no clip", job_of(BERT, clip=None), "bf16 + adamw_fused"),
        partial(compare_plain, "bert, adafactor", job_of(BERT), "bf16 + adafactor"),
        partial(compare_plain, "llama", job_of(LLAMA), "bf16 + adamw_fused"),
        partial(compare_plain, "llama, lora", job_of(LLAMA), "lora + bf16 + adamw_fused"),
        partial(compare_plain, "bert, fused", job_of(BERT), "bf16_master + adamw_fused + fused"),
        partial(compare_plain, "fused, padding", job_of(still, padding=0.3), "bf16 + adamw_fused + fused"),
        partial(compare_plain, "fused, padding, kept", job_of(BERT, padding=0.3), KEPT),
        partial(compare_plain, "no padding", job_of(drawn, padding=0.25), DROPPED),
        partial(compare_plain, "no padding, fused", job_of(drawn, padding=0.25), f"{DROPPED} + fused"),
        partial(compare_plain, "no padding, llama", job_of(LLAMA, padding=0.3), f"{DROPPED} + chunked_loss"),
        partial(compare_dropped, "dropped, bert", job_of(still, padding=0.3), "bf16 + adamw_fused"),
        partial(compare_dropped, "dropped, fused", job_of(still, padding=0.3), "bf16_master + fused"),
        partial(compare_dropped, "dropped, llama", job_of(LLAMA, padding=0.3), "bf16 + fused + chunked_loss"),
        partial(compare_plain, "llama, fused", job_of(LLAMA), "bf16 + adamw_fused + fused + chunked_loss"),
        partial(compare_plain, "llama, recomputed", job_of(LLAMA), "bf16 + adamw_fused + every_layer"),
        partial(compare_plain, "llama, selective", job_of(LLAMA), "bf16 + adamw_fused + selective(products)"),
        partial(compare_plain, "llama, fused, recomputed", job_of(LLAMA), RECOMPUTED),
        partial(refused_one, "dropout, recomputed", job_of(BERT), "bf16 + adamw_fused + every_layer"),
        partial(compare_plain, "bert, compact", job_of(BERT), "bf16_master + adamw_compact"),
        partial(compare_plain, "bert, 24 bits", job_of(BERT), "bf16_master + adamw_compact(master_bits=24)"),
        partial(compare_runs, "a run", still, "bf16 + adamw_fused"),
        partial(compare_runs, "a run with dropout", BERT, "bf16 + adamw_fused + micro_batches(2)"),
        partial(compare_runs, "a run with masters", BERT, "bf16_master + adamw_fused"),
        partial(compare_runs, "a run, all of it", BERT, "bf16_master + adamw_fused + fused"),
        partial(compare_runs, "a run without padding", still, f"{DROPPED} + fused"),
        partial(compare_runs, "a run, dropout, no padding", BERT, f"{DROPPED} + fused + micro_batches(2)"),
    ]


def main() -> int:
    found = []
    for number, case in enumerate(cases()):
        began = time.perf_counter()
        try:
            one = case()
        except Exception as error:  # the remaining cases are reported too
            one = {"case": number, "right": False, "error": f"{type(error).__name__}: {error}"}
        found.append(one)
        shown = {key: value for key, value in one.items() if key != "losses"}
        print({**shown, "seconds": round(time.perf_counter() - began, 1)}, flush=True)
    if len(sys.argv) > 1:
        gpu = torch.cuda.get_device_name(CUDA)
        Path(sys.argv[1]).write_text(json.dumps({"gpu": gpu, "torch": torch.__version__, "cases": found}))
    return int(not all(one["right"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
